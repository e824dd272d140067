"""``plan`` as a user sees it: text, JSON, other hardware, and what cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import Shape, write_checkpoint

from batchgen_lite.cli.app import run
from batchgen_lite.runtime.hardware import load_profile, profile_names

SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, width=32, vocab=400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, SHAPE)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "prompts.jsonl"
    lines = [{"token_ids": list(range(300, 310 + n)), "max_tokens": 20} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"prompt": 5}\n')
    return path


def plan(capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, *flags: str) -> tuple[int, str, str]:
    code = run(["plan", "--model", str(model), "--input", str(prompts), *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def fields(capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, *flags: str) -> dict[str, Any]:
    code, out, err = plan(capsys, model, prompts, "--json", *flags)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_plan_in_words(capsys: pytest.CaptureFixture[str], model: Path, prompts: Path) -> None:
    code, out, err = plan(capsys, model, prompts, "--ram", "2GiB")
    assert (code, err) == (0, "")
    labels = [line.split("  ")[0] for line in out.splitlines()]
    assert labels[:10] == [
        *("input", "tokens", "rates", "memory", "weights"),
        *("sweeps", "batch", "bound by", "speed", "time"),
    ]
    assert "12 rows to answer (1 more cannot be answered)" in out
    assert "all in memory after the first sweep" in out
    assert "assumed" in out


def test_the_plan_for_machines(capsys: pytest.CaptureFixture[str], model: Path, prompts: Path) -> None:
    found = fields(capsys, model, prompts, "--ram", "2GiB")
    assert found["fits"] is True
    assert found["rows"]["to_answer"] == 12
    assert found["rows"]["bad"] == 1
    assert found["tokens"] == {"prompt": sum(10 + n for n in range(12)), "new": 240}
    assert sum(found["memory"].values()) <= found["ram_bytes"] == 2 << 30
    assert found["sweep"]["count"] == 20
    assert found["decode_tokens_per_second"] == pytest.approx(240 / found["seconds"], rel=0.01)


def test_limit_and_expected_lengths_make_a_job_smaller(
    capsys: pytest.CaptureFixture[str], model: Path, prompts: Path
) -> None:
    whole = fields(capsys, model, prompts, "--ram", "2GiB")
    few = fields(capsys, model, prompts, "--ram", "2GiB", "--limit", "3", "--expect", "5")
    assert few["rows"]["to_answer"] == 3
    assert few["tokens"]["new"] == 15
    assert few["seconds"] < whole["seconds"]


def test_int8_kv_takes_less_memory(capsys: pytest.CaptureFixture[str], model: Path, prompts: Path) -> None:
    usual = fields(capsys, model, prompts, "--ram", "2GiB")
    int8 = fields(capsys, model, prompts, "--ram", "2GiB", "--kv-dtype", "int8")
    # Of 16 channels of two bytes each, and of one byte each with four of a scale.
    assert int8["memory"]["KV cache"] == pytest.approx(usual["memory"]["KV cache"] * (16 + 4) / 32)


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_gives_a_plan(
    name: str, capsys: pytest.CaptureFixture[str], model: Path, prompts: Path
) -> None:
    found = fields(capsys, model, prompts, "--hardware", name)
    assert found["rates"]["source"] == f"profile {name}"
    assert found["ram_bytes"] == load_profile(name).available


def test_shipped_profiles_name_the_sources_of_their_numbers() -> None:
    folder = Path(__file__).resolve().parents[2] / "batchgen_lite" / "hardware"
    for name in profile_names():
        data = json.loads((folder / f"{name}.json").read_text())
        numbers = {field for field, value in data.items() if isinstance(value, (int, float)) and value}
        assert numbers - {"threads"} <= set(data["sources"])
        assert all(len(source) > 20 for source in data["sources"].values())


def test_a_slower_disk_of_ones_own(
    capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, tmp_path: Path
) -> None:
    machine = {"available": "4GiB", "read_rate": 1e6, "flops": 1e12, "threads": 4}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(machine))
    slow = fields(capsys, model, prompts, "--hardware", str(file))
    file.write_text(json.dumps(machine | {"read_rate": 1e9}))
    fast = fields(capsys, model, prompts, "--hardware", str(file))
    assert slow["seconds"] > fast["seconds"]
    assert slow["seconds"] == pytest.approx(slow["bytes_read"] / 1e6, rel=0.2)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_does_not_fit_ends_with_the_smallest_budget_which_fits(
    as_json: bool, capsys: pytest.CaptureFixture[str], model: Path, prompts: Path
) -> None:
    flags = ["--json"] if as_json else []
    code, out, err = plan(capsys, model, prompts, "--ram", "64MiB", *flags)
    assert code == 4
    assert "--ram 64MiB is too small" in err
    if not as_json:
        assert out == ""
        return
    refused = json.loads(out)
    assert refused["fits"] is False
    # What the process itself takes may have grown by a little since.
    ram = refused["smallest_ram_bytes"] + (8 << 20)
    assert fields(capsys, model, prompts, "--ram", str(ram))["fits"] is True


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--ram", "many"], 2, "'many' is not a size"),
        (["--hardware", "no-such-machine"], 2, "give a JSON file or one of desktop-"),
        (["--input", "no-such-file.jsonl"], 2, "cannot read the input no-such-file.jsonl"),
        (["--expect", "0"], 2, "--expect"),
        (["--chat-template-kwargs", "["], 2, "is not JSON"),
    ],
)
def test_wrong_use(
    flags: Sequence[str], code: int, message: str, capsys: pytest.CaptureFixture[str], model: Path, prompts: Path
) -> None:
    found, out, err = plan(capsys, model, prompts, *flags)
    assert (found, out) == (code, "")
    assert message in err


def test_a_model_that_cannot_be_loaded(
    capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, tmp_path: Path
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    code, out, err = plan(capsys, tmp_path, prompts)
    assert (code, out) == (3, "")
    assert shard.name in err


def test_an_input_without_a_row_to_answer(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": 5}\nnot json\n')
    code, _, err = plan(capsys, model, file)
    assert code == 2
    assert "no row of" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"read_rate": 5}, "read_rate is 5; it must be a number of at least 100000"),
        ({"flops": "fast"}, "flops is 'fast'"),
        ({"threads": 0}, "link_rate is 0 as well"),
        ({"vram": 8}, "'vram' is not known"),
        ({"available": None}, "available: 'None' is not a size"),
    ],
)
def test_a_profile_that_is_none(
    change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"available": "4GiB", "read_rate": 1e9, "flops": 1e12, "threads": 4} | change))
    code, out, err = plan(capsys, model, prompts, "--hardware", str(file))
    assert (code, out) == (2, "")
    assert message in err


def test_a_spill_directory_holds_what_waits(
    capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, tmp_path: Path
) -> None:
    place = tmp_path / "not" / "yet"
    found = fields(capsys, model, prompts, "--ram", "2GiB", "--spill-dir", str(place), "--disk", "10MiB")
    without = fields(capsys, model, prompts, "--ram", "2GiB")
    assert without["spill"] is None
    spill = found["spill"]
    # A page of 64 positions, 2 layers and heads, 16 channels, keys and values in bf16, behind a header and aligned.
    slot = 2 * 2 * 64 * 16 * 2 * 2 + 4096
    assert (spill["bytes"], spill["pages"], spill["holds"]) == (10 << 20, (10 << 20) // slot, 0)
    assert spill["seconds_per_page"] == pytest.approx(2 * slot / found["rates"]["read_bytes_per_second"])
    assert found["memory"]["interpreter"] > 0
    assert not place.exists()  # a plan writes nothing
    code, out, _ = plan(capsys, model, prompts, "--ram", "2GiB", "--spill-dir", str(place))
    assert code == 0
    assert f"in {place}, " in out


def test_a_spill_file_without_a_directory_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, prompts: Path
) -> None:
    code, _, err = plan(capsys, model, prompts, "--disk", "1GiB")
    assert code == 2
    assert "give --spill-dir, too" in err
    code, _, err = plan(capsys, model, prompts, "--spill-dir", str(prompts / "below"))
    assert code == 5
    assert "is no directory" in err
