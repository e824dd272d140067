"""Batch inference for language models larger than the machine's memory.

>>> from batchgen_lite import LLM, SamplingParams
>>> with LLM("any", engine="stub") as llm:  # "stub" makes answers up; leave it out and give a model's path
...     results = llm.generate(["Hello", "Good morning"], SamplingParams(temperature=0, max_tokens=4))
>>> [result.index for result in results]
[0, 1]
>>> results[0].usage.prompt_tokens
5

Importing the package is cheap: torch is imported when a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen_lite.mkl_tuning import tune_mkl
from batchgen_lite.openmp_tuning import tune_openmp

tune_openmp()
tune_mkl()

__version__ = "0.1.0"

if TYPE_CHECKING:
    from batchgen_lite.llm import LLM
    from batchgen_lite.results import Result, Usage
    from batchgen_lite.sampling_params import SamplingParams

__all__ = ["LLM", "Result", "SamplingParams", "Usage", "__version__"]

_HOMES = {
    "LLM": "batchgen_lite.llm",
    "Result": "batchgen_lite.results",
    "SamplingParams": "batchgen_lite.sampling_params",
    "Usage": "batchgen_lite.results",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
