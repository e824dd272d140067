"""Text model and engine of one model, real or stub, for the command line and the library alike."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from batchgen_lite.errors import UsageError
from batchgen_lite.jobs.row_text import TextModel
from batchgen_lite.runtime.interface import Engine
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.trace.recorder import SILENT, Recorder

STUB = "stub"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How text becomes tokens and back; see ``jobs.model_text``."""

    date: str
    template_file: Path | None = None
    reasoning: str = "keep"


def engine_kind(asked: str | None = None) -> str:
    """ "auto", or "stub": made-up tokens without a model, for tests (``--engine stub`` or BATCHGEN_ENGINE)."""
    kind = asked or os.environ.get("BATCHGEN_ENGINE", "auto")
    if kind not in ("auto", STUB):
        raise UsageError(f"--engine is {kind!r}: it must be auto or stub")
    return kind


def open_text(path: Path, name: str, options: TextOptions, *, kind: str = "auto") -> TextModel:
    """Tokenizer and chat template of the model at ``path``. Torch-free. Raises ModelError."""
    if kind == STUB:
        from batchgen_lite.jobs.byte_text import ByteText
        from batchgen_lite.runtime.stub import StubOptions

        return ByteText(STUB, StubOptions.from_environment().context)
    from batchgen_lite.jobs.model_text import ModelText

    return ModelText(
        path, name=name, date=options.date, template_file=options.template_file, reasoning=options.reasoning
    )


def open_engine(path: Path, options: EngineOptions, *, kind: str = "auto", recorder: Recorder = SILENT) -> Engine:
    """The engine that runs the model at ``path``. Imports torch. Raises ModelError or BudgetError."""
    if kind == STUB:
        from batchgen_lite.runtime.stub import StubEngine, StubOptions

        return StubEngine(StubOptions.from_environment(), recorder)
    from batchgen_lite.runtime.build import build_engine

    return build_engine(path, options, recorder=recorder)
