"""The text side of a real model: tokenizer, chat template, stop ids and context length, read without torch."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen_lite.errors import RowError
from batchgen_lite.models.generation_config import read_generation_config
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.models.spec_from_config import spec_from_config
from batchgen_lite.models.spec_from_gguf import spec_from_gguf
from batchgen_lite.offload.checkpoint.open import open_checkpoint
from batchgen_lite.offload.checkpoint.tensors import Checkpoint
from batchgen_lite.sampling_params import SamplingParams
from batchgen_lite.text.chat_template import load_chat_template
from batchgen_lite.text.row_text import RowText
from batchgen_lite.text.tokenizer import load_tokenizer, stop_ids

REASONING = ("keep", "split", "drop")


class ModelText:
    """TextModel of the checkpoint at ``path``.

    Args:
        name: what records and the manifest call the model.
        date: the job's date, YYYY-MM-DD, which templates see as today, at midnight.
        template_file: a chat template to use instead of the model's own.
        reasoning: "keep" | "split" | "drop", see ``text.row_text``.

    Raises CheckpointError, UnsupportedError or TokenizerError.
    """

    def __init__(
        self, path: Path, *, name: str, date: str, template_file: Path | None = None, reasoning: str = "keep"
    ) -> None:
        checkpoint = open_checkpoint(path)
        spec, self.generation_config = _describe(checkpoint)
        self.name = name
        self.vocab_size = spec.vocab_size
        self.max_positions = spec.max_positions
        self._tokenizer = load_tokenizer(checkpoint)
        self._stop_ids = stop_ids(self._tokenizer, checkpoint.config, self.generation_config) | spec.eos_ids
        now = datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time())
        self._template = load_chat_template(self._tokenizer, file=template_file, now=now)
        self._reasoning = reasoning
        self._fingerprint = checkpoint.fingerprint
        self._template_digest = _digest(template_file) if template_file is not None else "the model's own"

    def identity(self) -> dict[str, str]:
        return {
            "name": self.name,
            "fingerprint": self._fingerprint,
            "chat_template": self._template_digest,
            "reasoning": self._reasoning,
        }

    def encode_prompt(self, prompt: str) -> list[int]:
        return self._tokenizer.encode(prompt, add_special=True)

    def encode_chat(self, messages: list[dict[str, Any]], template_kwargs: Mapping[str, Any]) -> list[int]:
        if self._template is None:
            raise RowError(
                "template_error",
                "the model has no chat template; give one with --chat-template FILE, or ask with prompt instead",
                param="messages",
            )
        text = self._template.render(messages, kwargs=template_kwargs)
        # The template writes its own special tokens: a second BOS would be a silent mistake.
        return self._tokenizer.encode(text, add_special=False)

    def new_row(self, params: SamplingParams, prompt_ids: Sequence[int]) -> RowText:
        return RowText(self._tokenizer, params, self._stop_ids, prompt_ids, reasoning=self._reasoning)

    def token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)


def _describe(checkpoint: Checkpoint) -> tuple[ModelSpec, Mapping[str, Any]]:
    if checkpoint.format == "gguf":
        return spec_from_gguf(checkpoint), {}
    generation_config = read_generation_config(checkpoint.root)
    # The stored dtype matters to weights only, which nobody reads here.
    return spec_from_config(checkpoint.config, generation_config, stored_dtype="float32"), generation_config


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
