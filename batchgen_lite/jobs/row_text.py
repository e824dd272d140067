"""What a job needs of a model's text: prompts to tokens, tokens to text. Implemented in ``batchgen_lite.text``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from batchgen_lite.runtime.interface import Finish
from batchgen_lite.sampling_params import SamplingParams


class RowText(Protocol):
    """The text of one running row. The same tokens always give the same state."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str | None:
        """Text that the model marked as its reasoning, kept apart; None where nothing is kept apart."""
        ...

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token id that ends this row, for the sampler, which rules them out before min_tokens."""
        ...

    def accept(self, token: int) -> Finish | None:
        """Take one generated token; a Finish says that the row ends with it."""
        ...


class TextModel(Protocol):
    """Tokenizer, chat template and stop rules of one model."""

    name: str
    vocab_size: int
    max_positions: int
    generation_config: Mapping[str, Any]

    def identity(self) -> dict[str, str]:
        """What decides tokens and text, for the manifest: fingerprints of files and settings."""
        ...

    def encode_prompt(self, prompt: str) -> list[int]: ...
    def encode_chat(self, messages: list[dict[str, Any]], template_kwargs: Mapping[str, Any]) -> list[int]:
        """RowError("template_error") if the template refuses the conversation."""
        ...

    def new_row(self, params: SamplingParams, prompt_ids: Sequence[int]) -> RowText: ...
    def token_text(self, token: int) -> str:
        """One token on its own, for logprobs."""
        ...
