"""The driver for transformers with disk offload: batches as planned, the same tokens whatever the placement."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from make_checkpoint import Shape, write_checkpoint
from rivals.accelerate_driver import batches_of, main, pad_left, planned_steps
from rivals.job_steps import Prompt
from transformers import Qwen3MoeForCausalLM

TINY = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, width=16, vocab=500)
LENGTHS = [(7, 4), (1, 2), (12, 1), (3, 6), (9, 3)]


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    draw = random.Random(4)
    return [Prompt([draw.randrange(300, 500) for _ in range(length)], new) for length, new in LENGTHS]


@pytest.fixture(scope="module")
def folder(prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    write_checkpoint(folder / "model", TINY)
    lines = [{"token_ids": prompt.ids, "max_tokens": prompt.new_tokens} for prompt in prompts]
    (folder / "job.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def drive(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[dict[str, object], list[list[int]]]:
    fixed = ["--model", "model", "--prompts", "job.jsonl", "--result", "out.json", "--tokens", "out.txt"]
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["driver", *fixed, "--dtype", "float32", "--threads", "1", *flags])
    main()
    rows = [json.loads(line) for line in (folder / "out.txt").read_text().splitlines()]
    return json.loads((folder / "out.json").read_text()), rows


def reference(folder: Path, prompts: list[Prompt]) -> list[list[int]]:
    """Each row by itself, without cache or padding."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = []
    for prompt in prompts:
        ids = list(prompt.ids)
        for _ in range(prompt.new_tokens):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(ids[len(prompt.ids) :])
    return rows


def in_job_order(rows: list[list[int]], prompts: list[Prompt], size: int) -> list[list[int]]:
    order = [prompt for batch in batches_of(prompts, size) for prompt in batch]
    return [rows[order.index(prompt)] for prompt in prompts]


def test_batches_hold_like_lengths_and_the_middle_comes_first(prompts: list[Prompt]) -> None:
    lengths = [[len(prompt.ids) for prompt in batch] for batch in batches_of(prompts, 2)]
    assert lengths == [[7, 9], [1, 3], [12]]


def test_planned_steps_count_padding_and_the_longest_answer(prompts: list[Prompt]) -> None:
    steps = planned_steps(batches_of(prompts, 2))
    assert [step.prompt_tokens for step in steps if step.prompt_tokens] == [18, 6, 12]
    assert len(steps) == 4 + 6 + 1


def test_padding_is_in_front() -> None:
    ids, mask = pad_left([Prompt([5, 6, 7], 1), Prompt([8], 1)])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("flags", [(), ("--memory", "20KB")], ids=["resident", "offloaded"])
def test_tokens_are_the_models_own(
    folder: Path, prompts: list[Prompt], flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, rows = drive(folder, monkeypatch, "--batch", "2", *flags)
    assert in_job_order(rows, prompts, 2) == reference(folder, prompts)
    assert outcome["extrapolated"] is False
    assert outcome["steps_run"] == outcome["steps_total"] == 11


def test_over_time_it_stops_and_extrapolates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = drive(folder, monkeypatch, "--batch", "1", "--seconds", "0")
    assert outcome["extrapolated"] is True
    assert outcome["steps_total"] == sum(new for _, new in LENGTHS)
    assert 6 <= outcome["steps_run"] < outcome["steps_total"]  # type: ignore[operator]
