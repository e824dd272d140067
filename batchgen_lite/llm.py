"""The library: the command's engine and records for Python callers."""

from __future__ import annotations

import asyncio
import datetime
import secrets
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from batchgen_lite.engine_thread import EngineThread
from batchgen_lite.errors import UsageError
from batchgen_lite.jobs.memory_source import MemorySource, Prompt
from batchgen_lite.jobs.prepare import ON_LONG, Preparer, Settings
from batchgen_lite.model_path import resolve_model
from batchgen_lite.offload.devices.names import check_vram
from batchgen_lite.offload.spill_file import spill_options
from batchgen_lite.pictures import Pictures
from batchgen_lite.results import Result
from batchgen_lite.runtime.interface import Progress, RunSummary
from batchgen_lite.runtime.options import KV_DTYPE_NAMES, EngineOptions
from batchgen_lite.sampling_mapping import FIELDS
from batchgen_lite.sampling_params import SamplingParams
from batchgen_lite.session import STUB, TextOptions, engine_kind, open_engine, open_text

Sampling = SamplingParams | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model that answers many prompts at once. Use it as a context manager, or ``close`` it.

    Args:
        model: a directory, a .gguf file, or a Hugging Face hub id (with ``revision``; ``download`` to fetch it).
        ram: ceiling of the process's memory: bytes, or text like "8GiB"; None = what the machine can spare.
        threads: compute threads; None = one a core.
        device: "auto" | "cpu" | "cuda" | "cuda:N"; auto takes a CUDA card where one can be used.
        vram: ceiling of the card's memory, as ``ram``; None = what the card can spare.
        kv_dtype: of the KV cache: "auto" (the model's) | "float32" | "bfloat16" | "float16" | "int8".
        spill_dir: let KV of prompts that have to wait go to a file here, where that saves time; None = nowhere.
        disk: ceiling of that file, as ``ram``; None = half of what is free there.
        spill_write_limit: most that is ever written to it, as ``ram``, against wear; None = no limit.
        seed: base seed of every call; None draws one for each.
        chat_template: a jinja file to use instead of the model's own.
        reasoning: "keep" in the text | "split" into ``Result.reasoning`` | "drop".
        on_long: prompts longer than the context: "error" | "truncate-left" | "truncate-right".
        date: the day that chat templates tell, YYYY-MM-DD; None = today.
        trace: write what happened when in all calls, for ui.perfetto.dev, to this file (.json or .json.gz).
        report: write one page of plots (.html): where time, bytes and memory of all calls went.

    ``trace`` and ``report`` are written by ``close``, if there was a call; one that cannot be written is a
    RuntimeWarning. While they are kept, 16 MiB of ``ram`` are theirs.

    Raises ModelError, BudgetError or UsageError.

    >>> llm = LLM("any", engine="stub")
    >>> [answer] = llm.chat([[{"role": "user", "content": "Hello!"}]], {"max_tokens": 3, "ignore_eos": True})
    >>> answer.finish_reason, answer.usage.completion_tokens
    ('length', 3)
    >>> llm.generate([{"prompt": "Hi", "temprature": 0}])[0].error.code  # one prompt's fault is its own
    'unsupported_parameter'
    >>> llm.close()
    """

    def __init__(
        self,
        model: str | Path,
        *,
        ram: int | str | None = None,
        threads: int | None = None,
        device: str = "auto",
        vram: int | str | None = None,
        kv_dtype: str = "auto",
        spill_dir: str | Path | None = None,
        disk: int | str | None = None,
        spill_write_limit: int | str | None = None,
        seed: int | None = None,
        chat_template: str | Path | None = None,
        reasoning: str = "keep",
        on_long: str = "error",
        date: str | None = None,
        trace: str | Path | None = None,
        report: str | Path | None = None,
        revision: str | None = None,
        download: bool = False,
        engine: str | None = None,
    ) -> None:
        if on_long not in ON_LONG:
            raise UsageError(f"on_long is {on_long!r}: it must be one of {', '.join(ON_LONG)}")
        if kv_dtype not in KV_DTYPE_NAMES:
            raise UsageError(f"kv_dtype is {kv_dtype!r}: it must be one of {', '.join(KV_DTYPE_NAMES)}")
        if reasoning not in ("keep", "split", "drop"):
            raise UsageError(f"reasoning is {reasoning!r}: it must be keep, split or drop")
        options = EngineOptions(
            ram=_bytes(ram, "ram"),
            threads=threads,
            kv_dtype=kv_dtype,
            device=device,
            vram=_bytes(vram, "vram"),
            spill=spill_options(spill_dir, disk, spill_write_limit),
        )
        check_vram(device, options.vram)
        kind = engine_kind(engine)
        name = str(model)
        path = Path(name) if kind == STUB else resolve_model(name, revision=revision, download=download)
        self._pictures = Pictures(trace, report, (name,))
        template = Path(chat_template) if chat_template is not None else None
        today = datetime.date.today().isoformat()
        self._text = open_text(path, name, TextOptions(date or today, template, reasoning), kind=kind)
        self._engine = open_engine(path, options, kind=kind, recorder=self._pictures.recorder)
        self._seed = seed
        self._on_long = on_long
        self._busy = threading.Lock()
        self._closed = False
        self._calls = 0
        self.last_run: RunSummary | None = None
        """Figures of the last call."""

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> list[Result]:
        """Answer all prompts; results in their order, failed ones with ``error`` set.

        A prompt is text, a list of token ids, or a line as in an input file (a dict, whose own sampling parameters go
        first). ``sampling``: one for all or one each. A SamplingParams counts as it is; a mapping or None leaves what
        it does not name to the model's generation_config.json. Works inside a running event loop (it blocks that
        loop; ``stream`` does not). ``on_progress`` is called a few times a second, from another thread."""
        results: dict[int, Result] = {}
        source = self._source(prompts, sampling, lambda result: results.__setitem__(result.index, result))
        with self._busy:
            thread = EngineThread(self._checked_engine(), source, on_progress=on_progress)
            source.settle()
            self._calls += 1
            thread.start()
            try:
                self.last_run = thread.result()
            except BaseException:
                thread.stop()
                raise
            finally:
                self._pictures.recorder.run_ends()
        return [results[index] for index in sorted(results)]

    def chat(
        self,
        conversations: Conversation | Iterable[Conversation],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> list[Result]:
        """As ``generate``, for conversations: lists of ``{"role": ..., "content": ...}``, or one such list."""
        return self.generate(_chat_lines(conversations, chat_template_kwargs), sampling, on_progress=on_progress)

    async def stream(
        self, prompts: str | Iterable[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> AsyncIterator[Result]:
        """Yield results as they finish. Leaving the loop early stops the run and drops the rest.

        >>> async def main():
        ...     with LLM("any", engine="stub") as llm:
        ...         return sorted([result.index async for result in llm.stream(["a", "b", "c"], {"temperature": 0})])
        >>> asyncio.run(main())
        [0, 1, 2]
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Result | None] = asyncio.Queue()

        def deliver(item: Result | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        source = self._source(prompts, sampling, deliver)
        await asyncio.to_thread(self._busy.acquire)
        thread = EngineThread(self._checked_engine(), source, on_end=lambda: deliver(None))
        try:
            source.settle()
            self._calls += 1
            thread.start()
            while (result := await queue.get()) is not None:
                yield result
            self.last_run = thread.result()
        finally:
            await asyncio.to_thread(thread.stop)
            self._pictures.recorder.run_ends()
            self._busy.release()

    def close(self) -> None:
        """Free the model's memory and threads; write ``trace`` and ``report``. Idempotent."""
        if not self._closed:
            self._closed = True
            lines = {"calls": f"{self._calls:,}"} | (self._engine.describe() if self._calls else {})
            self._engine.close()
            if self._calls:
                self._pictures.write(self._text.name, lines, _warn)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked_engine(self) -> Any:
        if self._closed:
            raise UsageError("the LLM is closed; create a new one")
        return self._engine

    def _source(
        self,
        prompts: str | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        deliver: Callable[[Result], object],
    ) -> MemorySource:
        items = [prompts] if isinstance(prompts, str) else list(prompts)
        base_seed = self._seed if self._seed is not None else secrets.randbits(53)
        if sampling is None or isinstance(sampling, (SamplingParams, Mapping)):
            preparers = [self._preparer(base_seed, sampling)] * len(items)
        else:
            if len(sampling) != len(items):
                raise UsageError(f"{len(sampling)} sampling parameters for {len(items)} prompts; give one for each")
            preparers = [self._preparer(base_seed, wishes) for wishes in sampling]
        return MemorySource(items, preparers, self._text, deliver)

    def _preparer(self, base_seed: int, sampling: Sampling | None) -> Preparer:
        """ParameterError: a wrong value here is the caller's fault, not each row's."""
        if isinstance(sampling, SamplingParams):
            sampling = {name: getattr(sampling, name) for name in FIELDS}
        return Preparer(Settings(base_seed % 2**64, sampling or {}, {}, self._on_long), self._text)


def _chat_lines(
    conversations: Conversation | Iterable[Conversation], kwargs: Mapping[str, Any] | None
) -> list[Mapping[str, Any]]:
    given: list[Any] = list(conversations)
    if given and isinstance(given[0], Mapping):  # the turns of one conversation
        given = [given]
    extra: dict[str, Any] = {} if not kwargs else {"chat_template_kwargs": dict(kwargs)}
    return [{"messages": [dict(message) for message in turns], **extra} for turns in given]


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=5)  # at who closes


def _bytes(size: int | str | None, name: str) -> int | None:
    if not isinstance(size, str):
        return size
    from batchgen_lite.offload.budget import parse_size

    return parse_size(size, name)
