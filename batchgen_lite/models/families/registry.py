"""All families, and the choice of one by a config's ``architectures`` and ``model_type``."""

from __future__ import annotations

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.families.common import Family
from batchgen_lite.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from batchgen_lite.models.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from batchgen_lite.models.families.glm import GLM4_MOE
from batchgen_lite.models.families.gpt_oss import GPT_OSS
from batchgen_lite.models.families.granite import GRANITE_MOE, GRANITE_MOE_SHARED
from batchgen_lite.models.families.moe import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
)

_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}


def find_family(config: Config) -> tuple[Family, str]:
    """The family and the architecture's name. UnsupportedError, with what is supported, where there is none."""
    names = config.value("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{config.source}: 'architectures' is {names!r}, but must be a list of names.")
    model_type = config.text("model_type", default="")
    if not names and not model_type:
        raise CheckpointError(f"{config.source} names neither 'architectures' nor 'model_type'; is it a model's?")
    family = next((_BY_ARCHITECTURE[name] for name in names if name in _BY_ARCHITECTURE), None)
    if not names:
        family = _BY_MODEL_TYPE.get(model_type)
    if family is None:
        remote = "; its remote code (auto_map) is never run" if config.has("auto_map") else ""
        raise UnsupportedError(
            f"{config.source}: architecture {', '.join(names) or model_type} is not implemented{remote}. "
            f"Supported: {', '.join(sorted(_BY_ARCHITECTURE))}."
        )
    other = _BY_MODEL_TYPE.get(model_type)
    if other is not None and other is not family:
        raise UnsupportedError(
            f"{config.source}: architecture {', '.join(names)} contradicts model_type {model_type!r}."
        )
    return family, next((name for name in names if name in _BY_ARCHITECTURE), family.architectures[0])
