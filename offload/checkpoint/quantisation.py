"""Quantised safetensors checkpoints: which scheme a configuration names, and matrices made of its tensors.

Schemes are recognised by ``quantization_config`` of config.json and by the tensors beside a weight, never by guessing:
what a scheme leaves open (block sizes, group sizes, layouts) must be stated, and anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.compressed_tensors import parse_compressed_tensors
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.schemes import parse_awq, parse_fp8, parse_gptq, parse_mxfp4
from batchgen_lite.offload.checkpoint.tensors import Checkpoint


class Scheme(Protocol):
    """How the modules of one checkpoint are quantised."""

    @property
    def method(self) -> str:
        """``quant_method`` of the configuration."""
        ...

    def tensor_names(self, checkpoint: Checkpoint, module: str) -> tuple[str, ...]:
        """The stored tensors that together are the weight of ``module`` (a name without ".weight"), the codes first;
        one name where the module is not quantised, none where it is not stored. A weight without its scales, or
        scales without their weight, raises CheckpointError."""
        ...

    def matrix(self, checkpoint: Checkpoint, module: str, index: int | None = None) -> Matrix:
        """The weight of ``module``; ``index``: entry of tensors that stack several experts. CheckpointError if it is
        not stored or its tensors do not agree, UnsupportedError for an encoding that cannot be widened."""
        ...


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": parse_fp8,
    "mxfp4": parse_mxfp4,
    "gptq": parse_gptq,
    "awq": parse_awq,
    "compressed-tensors": parse_compressed_tensors,
}


def parse_scheme(quantization_config: Mapping[str, Any]) -> Scheme:
    """The scheme that ``quantization_config`` of config.json names.

    Raises UnsupportedError, naming method or option, for one that is not implemented; CheckpointError for a
    configuration that lacks or contradicts what it must say.
    """
    method = quantization_config.get("quant_method")
    if not isinstance(method, str):
        raise CheckpointError(f"quantization_config names no quant_method: {sorted(quantization_config)[:8]}")
    if method not in _PARSERS:
        raise UnsupportedError(
            f"quantisation {method!r} is not implemented; implemented: {', '.join(_PARSERS)}. "
            "Use an unquantised version of the model, or a GGUF file"
        )
    return _PARSERS[method](quantization_config)


def quantised_matrix(
    checkpoint: Checkpoint, name: str, quantization_config: Mapping[str, Any], index: int | None = None
) -> Matrix:
    """The weight of module ``name`` (with or without ".weight"), quantised or not. Errors as ``parse_scheme`` and
    ``Scheme.matrix``; who builds many matrices should parse the scheme once."""
    return parse_scheme(quantization_config).matrix(checkpoint, name.removesuffix(".weight"), index)
