"""The driver for llama.cpp, against a stand-in for its binding: every row gets its own tokens, whatever shares a step.

The stand-in keeps each sequence's tokens as the library keeps its cache, refuses what the library refuses, and
answers with a token that depends on all tokens of that sequence and on nothing else.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

VOCABULARY = 97
LENGTHS = [(5, 3), (1, 1), (9, 6), (30, 2), (4, 4), (2, 9)]


def answer(tokens: list[int]) -> int:
    return sum((place + 1) * token for place, token in enumerate(tokens)) % VOCABULARY


class StandIn(ModuleType):
    """As much of llama_cpp as the driver uses."""

    LLAMA_LOAD_MODE_MMAP, LLAMA_LOAD_MODE_DIRECT_IO, LLAMA_LOAD_MODE_NONE = 1, 4, 0

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.held: dict[int, list[int]] = {}
        self.logits: dict[int, ctypes.Array[ctypes.c_float]] = {}
        self.context = SimpleNamespace()

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    llama_context_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path: bytes, params: SimpleNamespace) -> str | None:
        return None if path.endswith(b"broken.gguf") else "model"

    def llama_init_from_model(self, model: str, params: SimpleNamespace) -> SimpleNamespace:
        self.context = params
        return params

    def llama_model_get_vocab(self, model: str) -> str:
        return "vocabulary"

    def llama_vocab_n_tokens(self, vocabulary: str) -> int:
        return VOCABULARY

    def llama_get_memory(self, context: SimpleNamespace) -> dict[int, list[int]]:
        return self.held

    def llama_batch_init(self, tokens: int, embedding: int, sequences: int) -> SimpleNamespace:
        return SimpleNamespace(
            n_tokens=0,
            token=[0] * tokens,
            pos=[0] * tokens,
            n_seq_id=[0] * tokens,
            seq_id=[[0] * sequences for _ in range(tokens)],
            logits=[0] * tokens,
        )

    def llama_batch_free(self, batch: SimpleNamespace) -> None: ...

    def llama_decode(self, context: SimpleNamespace, batch: SimpleNamespace) -> int:
        self.logits.clear()
        for index in range(batch.n_tokens):
            (sequence,) = batch.seq_id[index][: batch.n_seq_id[index]]
            held = self.held.setdefault(sequence, [])
            if batch.pos[index] != len(held) or not 0 <= sequence < context.n_seq_max:
                return -1  # "invalid input batch": positions of a sequence must follow each other
            held.append(batch.token[index])
            if sum(map(len, self.held.values())) > context.n_ctx:
                return 1  # "could not find a KV slot"
            if batch.logits[index]:
                row = (ctypes.c_float * VOCABULARY)()
                row[answer(held)] = 1.0
                self.logits[index] = row
        return 0

    def llama_get_logits_ith(self, context: SimpleNamespace, index: int) -> ctypes.Array[ctypes.c_float]:
        return self.logits[index]

    def llama_memory_seq_rm(self, memory: dict[int, list[int]], sequence: int, start: int, stop: int) -> bool:
        assert (start, stop) == (-1, -1)
        del memory[sequence]
        return True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    library = StandIn()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.delitem(sys.modules, "rivals.llama_cpp_driver", raising=False)
    return library


@pytest.fixture
def rows(tmp_path: Path) -> list[tuple[list[int], int]]:
    draw = random.Random(2)
    rows = [([draw.randrange(VOCABULARY) for _ in range(length)], new) for length, new in LENGTHS]
    lines = [json.dumps({"token_ids": ids, "max_tokens": new}) + "\n" for ids, new in rows]
    (tmp_path / "job.jsonl").write_text("".join(lines))
    return rows


def drive(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, object]:
    driver = importlib.import_module("rivals.llama_cpp_driver")
    fixed = ["--model", "model.gguf", "--prompts", "job.jsonl", "--result", "out.json", "--tokens", "out.txt"]
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["driver", *fixed, *flags])
    driver.main()
    outcome: dict[str, object] = json.loads((folder / "out.json").read_text())
    return outcome


def alone(ids: list[int], new: int) -> list[int]:
    tokens = list(ids)
    for _ in range(new):
        tokens.append(answer(tokens))
    return tokens[len(ids) :]


@pytest.mark.parametrize("kv", ["unified", "per-sequence"])
@pytest.mark.parametrize(("sequences", "batch"), [(1, 1), (2, 7), (4, 16), (64, 64)])
def test_every_row_gets_its_own_tokens(
    library: StandIn,
    rows: list[tuple[list[int], int]],
    kv: str,
    sequences: int,
    batch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = drive(tmp_path, monkeypatch, "--kv", kv, "--sequences", str(sequences), "--batch", str(batch))
    got = [json.loads(line) for line in (tmp_path / "out.txt").read_text().splitlines()]
    assert got == [alone(ids, new) for ids, new in rows]
    assert outcome["extrapolated"] is False
    assert not library.held
    assert library.context.kv_unified is (kv == "unified")
    assert library.context.n_seq_max == min(sequences, len(rows))


def test_over_time_it_is_extrapolated(
    library: StandIn, rows: list[tuple[list[int], int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = drive(tmp_path, monkeypatch, "--sequences", "2", "--batch", "4", "--seconds", "0")
    assert outcome["extrapolated"] is True
    assert outcome["steps_run"] < outcome["steps_total"]  # type: ignore[operator]


def test_a_cache_that_is_too_small_ends_the_run(
    library: StandIn, rows: list[tuple[list[int], int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = importlib.import_module("rivals.llama_cpp_driver")
    monkeypatch.setattr(driver, "cache_cells", lambda *_: 8)
    with pytest.raises(SystemExit, match="llama_decode returned 1"):
        drive(tmp_path, monkeypatch)


def test_a_file_that_cannot_be_loaded_is_named(
    library: StandIn, rows: list[tuple[list[int], int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"broken\.gguf"):
        drive(tmp_path, monkeypatch, "--model", "broken.gguf")
