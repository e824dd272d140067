"""A torch-free engine that makes tokens up, for tests of everything around an engine.

Tokens depend on the prompt and on (seed, row, step), as a real engine's do; greedy rows on the prompt alone. Faults are
asked for through ``StubOptions``, at process level through the variable BATCHGEN_STUB, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from batchgen_lite import errors
from batchgen_lite.runtime.interface import (
    Finish,
    Progress,
    RequestSource,
    RunSummary,
    SampledToken,
    SequenceOutput,
    SequenceRequest,
)
from batchgen_lite.trace.recorder import SILENT, Recorder, States

EOS = 256

_ALPHABET = "abcdefghijklmnopqrstuvwxyz      ,.\n" + "éß漢🙂"


@dataclass(frozen=True, slots=True)
class StubOptions:
    """``batch`` rows run at once; a sweep takes ``step_seconds``; a row ends by itself after ``mean_tokens`` tokens on
    average. ``bad_logits_row``: this row (counted by admission) gets logits that are not finite. ``fail_sweep`` and
    ``fail_with``: that sweep raises the named exception. ``context``: tokens of the pretended model."""

    batch: int = 16
    step_seconds: float = 0.0
    mean_tokens: int = 24
    context: int = 4096
    bad_logits_row: int | None = None
    fail_sweep: int | None = None
    fail_with: str = "StorageError"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> StubOptions:
        return cls(**json.loads(environment.get("BATCHGEN_STUB", "{}")))


@dataclass(slots=True)
class _Running:
    request: SequenceRequest
    output: SequenceOutput
    digest: bytes
    step: int
    poisoned: bool


class StubEngine:
    """Implements ``Engine``. One token a row a sweep."""

    def __init__(self, options: StubOptions | None = None, recorder: Recorder = SILENT) -> None:
        self.options = options or StubOptions()
        self._recorder = recorder
        self._stop = False
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._progress = Progress()
        self._started = 0.0

    async def run(self, source: RequestSource) -> RunSummary:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        if self._stop:
            self._wake.set()
        self._started = time.monotonic()
        self._progress = progress = Progress(rows_total=len(source), bound_by="disk")
        running: list[_Running] = []
        admitted = 0
        while not self._stop and (running or admitted < len(source)):
            while len(running) < self.options.batch and admitted < len(source):
                row = self._admit(source, admitted)
                running += [row] if row is not None else []
                admitted += 1
            progress.rows_running = len(running)
            self._recorder.sweep_begins(len(running), States(len(running), waiting=len(source) - admitted))
            since = self._recorder.now()
            await self._pause()
            progress.sweeps += 1
            if progress.sweeps == self.options.fail_sweep:
                raise _error(self.options.fail_with)
            if not self._stop:
                self._recorder.sweep_ends(since, 0, len(running), len(running))
                running = [row for row in running if not self._advance(row)]
        stopped, self._stop = self._stop, False
        return self._summary(stopped)

    def request_stop(self) -> None:
        self._stop = True
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs that could be woken
                loop.call_soon_threadsafe(wake.set)

    def progress(self) -> Progress:
        progress = self._progress
        seconds = max(time.monotonic() - self._started, 1e-9)
        progress.decode_rate = progress.tokens_decoded / seconds
        finished = progress.rows_done + progress.rows_failed
        left = progress.rows_total - finished
        progress.eta_seconds = seconds / finished * left if finished else None
        return progress

    def describe(self) -> dict[str, str]:
        return {"engine": "stub (no model: made-up tokens)", "batch": f"{self.options.batch} rows"}

    def close(self) -> None:
        self._loop = self._wake = None

    async def _pause(self) -> None:
        if self.options.step_seconds > 0 and self._wake is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self.options.step_seconds)
        else:
            await asyncio.sleep(0)

    def _admit(self, source: RequestSource, index: int) -> _Running | None:
        try:
            request, output = source.open(index)
        except Exception as error:
            source.failed(index, error)
            self._progress.rows_failed += 1
            return None
        key = [0, 0] if request.sampling.greedy else [request.seed, request.row]
        digest = hashlib.sha256(json.dumps([*key, list(request.prompt_ids)]).encode()).digest()
        self._progress.tokens_prefilled += len(request.prompt_ids) + len(request.prior_ids)
        return _Running(request, output, digest, len(request.prior_ids), index == self.options.bad_logits_row)

    def _advance(self, row: _Running) -> bool:
        """One token; True if the row has ended."""
        try:
            finish = row.output.accept(self._sample(row))
            row.step += 1
            self._progress.tokens_decoded += 1
            if finish is None:
                return False
            self._end(row, finish)
        except Exception as error:
            row.output.failed(error)
            self._progress.rows_failed += 1
        return True

    def _end(self, row: _Running, finish: Finish) -> None:
        row.output.done(finish)
        self._progress.rows_done += 1
        self._recorder.finished(len(row.request.prompt_ids), row.step, finish.reason)

    def _sample(self, row: _Running) -> SampledToken:
        if row.poisoned:
            return SampledToken(0, error="nan")
        token, draw = self._token(row)
        wanted = row.request.sampling.logprobs
        if wanted is None:
            return SampledToken(token)
        top = tuple(((token + i) % EOS, -1.0 - i - draw / 2**32) for i in range(wanted))
        return SampledToken(token, top[0][1] if top else -math.inf, top)

    def _token(self, row: _Running) -> tuple[int, int]:
        """The row's token at its step, and 32 bits of the same draw. Four steps spell up to four characters."""
        draw = _draw(row.digest, "token", row.step)
        if draw % self.options.mean_tokens == 0 and row.step >= row.request.sampling.min_tokens:
            return EOS, draw
        group, place = divmod(row.step, 4)
        letters = _draw(row.digest, "letters", group)
        spelled = "".join(_ALPHABET[(letters >> (8 * i)) % len(_ALPHABET)] for i in range(4)).encode()
        return spelled[place], draw

    def _summary(self, stopped: bool) -> RunSummary:
        progress = self._progress
        return RunSummary(
            wall_seconds=time.monotonic() - self._started,
            tokens_prefilled=progress.tokens_prefilled,
            tokens_decoded=progress.tokens_decoded,
            sweeps=progress.sweeps,
            stopped_early=stopped,
        )


def _draw(digest: bytes, purpose: str, counter: int) -> int:
    """32 bits that depend on the arguments alone."""
    return int.from_bytes(hashlib.sha256(digest + f"{purpose} {counter}".encode()).digest()[:4], "little")


def _error(name: str) -> Exception:
    kind = getattr(errors, name, None)
    return kind(f"the stub engine was told to raise {name}") if kind else RuntimeError(f"the stub's own bug: {name}")
