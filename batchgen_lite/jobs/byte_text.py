"""A text model without a model: a token is a byte. Goes with the stub engine, where the model is not the point."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen_lite.errors import RowError
from batchgen_lite.runtime.interface import Finish
from batchgen_lite.runtime.stub import EOS
from batchgen_lite.sampling_params import SamplingParams


class ByteText:
    """TextModel whose vocabulary is the 256 bytes and an end mark; chats are rendered as ``role: content`` lines."""

    def __init__(self, name: str = "stub", max_positions: int = 4096) -> None:
        self.name = name
        self.vocab_size = EOS + 1
        self.max_positions = max_positions
        self.generation_config: Mapping[str, Any] = {}

    def identity(self) -> dict[str, str]:
        return {"name": self.name, "tokenizer": "bytes", "context": str(self.max_positions)}

    def encode_prompt(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def encode_chat(self, messages: list[dict[str, Any]], template_kwargs: Mapping[str, Any]) -> list[int]:
        for message in messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise RowError("template_error", f"the template knows no role {message['role']!r}", param="messages")
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode_prompt("".join(turns) + "assistant: ")

    def new_row(self, params: SamplingParams, prompt_ids: Sequence[int]) -> ByteRow:
        return ByteRow(params)

    def token_text(self, token: int) -> str:
        return "" if token == EOS else bytes([token]).decode(errors="replace")


class ByteRow:
    """RowText over bytes: UTF-8 as far as complete, stop strings, EOS, stop ids, min_tokens and max_tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""
        self.reasoning: str | None = None
        self.token_ids: list[int] = []

    @property
    def stop_ids(self) -> frozenset[int]:
        ends = frozenset(self._params.stop_token_ids)
        return ends if self._params.ignore_eos else ends | {EOS}

    def accept(self, token: int) -> Finish | None:
        self.token_ids.append(token)
        count, params = len(self.token_ids), self._params
        may_stop = count > params.min_tokens
        if may_stop and token == EOS and not params.ignore_eos:
            return self._end("stop", None)
        if may_stop and token in params.stop_token_ids:
            return self._end("stop", token)
        if token != EOS:
            self.text += self._decoder.decode(bytes([token]))
        if may_stop and (stop := self._stop_string()) is not None:
            return self._end("stop", stop)
        return self._end("length", None) if count >= params.max_tokens else None

    def _stop_string(self) -> str | None:
        hits = [(self.text.find(stop), stop) for stop in self._params.stop if stop in self.text]
        if not hits:
            return None
        position, stop = min(hits)
        end = position + (len(stop) if self._params.include_stop_str_in_output else 0)
        self.text = self.text[:end]
        return stop

    def _end(self, reason: str, stop_reason: str | int | None) -> Finish:
        self.text += self._decoder.decode(b"", final=True) if not isinstance(stop_reason, str) else ""
        return Finish(reason, stop_reason)
