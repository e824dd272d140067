"""Comparisons: engines are started and read rightly, the best settings found, failures shown, tables true."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import compare
import pytest
from compare import OUT_OF_MEMORY, REGIMES, Regime, Setting, best_settings, run_once, run_within_memory
from compare_table import COLUMNS, Result, markdown
from engines import ENGINES, Accelerate, Job, LlamaCpp, Ours, Reported, Settings, json_lines
from make_checkpoint import Shape

TINY = Shape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, width=16, vocab=500)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    for name in ("checkpoint", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text('{"num_experts_per_tok": 2, "num_experts": 8}')
    (tmp_path / "model.gguf").touch()
    return Job(
        checkpoint=tmp_path / "checkpoint",
        gguf=tmp_path / "model.gguf",
        prompts=tmp_path / "job.jsonl",
        scratch=tmp_path / "scratch",
        memory=None,
        rival_seconds=1.0,
        threads=1,
    )


class Fake:
    """An engine whose commands are lines of Python: its speed and its failures follow from its settings."""

    name = "fake"

    def __init__(self, code: str = "pass", seconds: Mapping[str, float] | None = None) -> None:
        self.code = code
        self.seconds = seconds or {}

    def missing(self) -> str | None:
        return None

    def first(self, job: Job) -> Settings:
        return {"rows": 64, "kind": "a"}

    def dimensions(self, job: Job) -> dict[str, list[object]]:
        return {"rows": [128, 32], "kind": ["b"]}

    def command(self, job: Job, settings: Settings) -> list[str]:
        key = f"{settings['rows']}{settings['kind']}"
        (job.scratch / "key").write_text(key)
        return [sys.executable, "-c", "raise SystemExit(3)" if self.seconds and key not in self.seconds else self.code]

    def reported(self, job: Job, stderr: str) -> Reported:
        key = (job.scratch / "key").read_text()
        return Reported(prompt_tokens=10, new_tokens=20, steps=5, seconds=self.seconds.get(key))


def setting_of(job: Job) -> Setting:
    return Setting("chat", Regime("resident", None, None), job)


def test_best_settings_are_found_one_dimension_at_a_time(job: Job) -> None:
    engine = Fake(seconds={"64a": 10.0, "32a": 7.0, "64b": 1.0, "32b": 5.0})  # 128a fails
    assert best_settings(engine, setting_of(job)) == {"rows": 32, "kind": "b"}


def test_settings_that_fail_lose(job: Job) -> None:
    engine = Fake(seconds={"128a": 9.0})
    assert best_settings(engine, setting_of(job)) == {"rows": 128, "kind": "a"}


@pytest.mark.parametrize("killed", [0, 1, 3])
def test_other_settings_are_tried_where_memory_does_not_do(
    killed: int, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[Settings] = []

    def run(engine: object, setting: Setting, settings: Settings) -> Result:
        tried.append(settings)
        failed = OUT_OF_MEMORY if len(tried) <= killed else None
        return result_of(settings=dict(settings), failed=failed)

    monkeypatch.setattr(compare, "run_once", run)
    result = run_within_memory(Fake(), setting_of(job), Fake().first(job))
    assert len(tried) == killed + 1
    assert result.failed is None
    assert result.settings == dict(tried[-1])
    assert len({str(settings) for settings in tried}) == len(tried)
    assert capsys.readouterr().err.count(OUT_OF_MEMORY) == killed


@pytest.mark.parametrize("failed", [OUT_OF_MEMORY, "exit code 1: no such flag"])
def test_a_run_that_fails_with_all_settings_is_reported(failed: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "run_once", lambda *_: result_of(failed=failed))
    assert run_within_memory(Fake(), setting_of(job), Fake().first(job)).failed == failed


def test_a_run_has_figures_from_inside_and_outside(job: Job) -> None:
    # What a command takes right before its end is not seen from outside: it holds the memory a while.
    held = Fake("import time; x = bytearray(60 << 20); time.sleep(1)")
    result = run_once(held, setting_of(job), {"rows": 1, "kind": "a"})
    assert result.failed is None
    assert (result.prompt_tokens, result.new_tokens, result.steps) == (10, 20, 5)
    assert result.peak_rss > 60 << 20
    assert 0 < result.bct_seconds < 30
    assert result.output_rate == pytest.approx(20 / result.bct_seconds)


def test_a_failed_run_keeps_its_last_words(job: Job) -> None:
    result = run_once(Fake("raise RuntimeError('no such thing')"), setting_of(job), {"rows": 1, "kind": "a"})
    assert result.failed is not None
    assert "exit code 1" in result.failed
    assert "no such thing" in result.failed


def test_limits_that_cannot_be_set_are_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise compare.LimitsUnavailable("no right to")

    monkeypatch.setattr(compare, "limited", refuse)
    setting = replace(setting_of(job), regime=REGIMES["ram+disk"], job=replace(job, memory=1 << 30))
    result = run_once(Fake(), setting, {"rows": 1, "kind": "a"})
    assert result.unlimited == "no right to"
    assert "NOT LIMITED on this machine: no right to" in markdown([result])


def test_our_command_and_its_summary(job: Job) -> None:
    command = Ours().command(replace(job, memory=12345), {})
    assert command[command.index("--ram") + 1] == "12345"
    assert "--ram" not in Ours().command(job, {})
    figures = {"total": 4, "ok": 4, "failed": 0, "left": 0, "tokens_prefilled": 9, "tokens_decoded": 8, "sweeps": 3}
    summary = json.dumps({"event": "summary", **figures})
    reported = Ours().reported(job, f"a warning\n{summary}\n")
    assert (reported.prompt_tokens, reported.new_tokens, reported.steps, reported.extrapolated) == (9, 8, 3, False)


def test_a_job_with_failed_rows_does_not_count(job: Job) -> None:
    figures = {"total": 4, "ok": 3, "failed": 1, "left": 0}
    with pytest.raises(ValueError, match="1 rows failed"):
        Ours().reported(job, json.dumps({"event": "summary", **figures}))
    with pytest.raises(ValueError, match="no summary"):
        Ours().reported(job, '{"event": "progress"}')


@pytest.mark.parametrize("engine", [Accelerate(), LlamaCpp()], ids=lambda engine: engine.name)
@pytest.mark.parametrize("memory", [None, 1 << 30])
def test_settings_become_flags(engine: Accelerate | LlamaCpp, memory: int | None, job: Job) -> None:
    job = replace(job, memory=memory)
    settings = dict(engine.first(job))
    for name, values in engine.dimensions(job).items():
        assert name in settings
        assert settings[name] not in values
        settings[name] = values[0]
    command = engine.command(job, settings)
    assert all(command[command.index(f"--{name}") + 1] == str(value) for name, value in settings.items())
    assert command[command.index("--choice") + 1] == "0.25"  # two of eight experts


def test_an_extrapolated_outcome_counts_with_its_own_time(job: Job) -> None:
    outcome = {"prompt_tokens": 1, "new_tokens": 2, "steps_total": 9, "bct_seconds": 77.0, "extrapolated": True}
    (job.scratch / "accelerate.json").write_text(json.dumps(outcome))
    assert Accelerate().reported(job, "").seconds == 77.0
    (job.scratch / "accelerate.json").write_text(json.dumps({**outcome, "extrapolated": False}))
    assert Accelerate().reported(job, "").seconds is None


def test_a_rival_that_is_not_installed_is_named() -> None:
    class Absent(LlamaCpp):
        module = "no_such_module"

    assert Absent().missing() == "the module no_such_module is not installed here"
    assert Accelerate().missing() is None


def test_json_lines_are_found_among_others() -> None:
    assert list(json_lines('{"a": 1}\nnoise {\n[2]\n\n{"b": 2}')) == [{"a": 1}, {"b": 2}]


def result_of(**changes: object) -> Result:
    base = Result("batchgen-lite", "chat", "ram", {}, 10.0, 1 << 30, 2 * 10**9, new_tokens=100, steps=7)
    return replace(base, **changes)  # type: ignore[arg-type]


def cells(table: str, engine: str) -> dict[str, str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {engine} "))
    return dict(zip(COLUMNS, [cell.strip() for cell in line.strip("|").split("|")], strict=True))


def test_table_compares_with_ours() -> None:
    rival = result_of(engine="accelerate", bct_seconds=125.0, extrapolated=True, settings={"batch": 64})
    table = markdown([result_of(read_rate=250 * 10**6), rival])
    ours = cells(table, "batchgen-lite")
    assert (ours["BCT"], ours["output tok/s"], ours["of the disk's bound"]) == ("10.0 s", "10.0", "0.80")
    theirs = cells(table, "accelerate")
    assert (theirs["BCT"], theirs["ours is"], theirs["settings"]) == ("~125.0 s", "~12.50x faster", "batch 64")
    assert "extrapolated" in table


def test_table_shows_failures_and_sections() -> None:
    failed = result_of(engine="llama.cpp", failed="killed: out of memory")
    table = markdown([result_of(), failed, result_of(regime="resident", memory=None)])
    assert cells(table, "llama.cpp")["BCT"] == "killed: out of memory"
    assert [line for line in table.splitlines() if line.startswith("###")] == ["### chat, ram", "### chat, resident"]


def test_a_bare_loop_is_run_beside_ours_alone_and_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "bare_loop_share", lambda setting: 0.9)
    ours = compare.checked(result_of(engine=compare.OURS), setting_of(job))
    assert ours.extra["bare_loop_share"] == 0.9
    monkeypatch.setattr(compare, "bare_loop_share", lambda setting: 0.1)
    for result in (ours, result_of(engine="llama.cpp"), result_of(engine=compare.OURS, failed="killed")):
        assert compare.checked(result, setting_of(job)) == result


def test_a_whole_comparison_with_a_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate itself on a tiny model, through limits, driver and table."""
    args = argparse.Namespace(
        work=tmp_path,
        quick=True,
        untuned=True,
        workloads=["stragglers"],
        regimes=["resident"],
        engines=["accelerate", "absent"],
        limit=4,
        rival_seconds=60.0,
        threads=1,
        checks=True,
        resume=False,
    )
    monkeypatch.setitem(ENGINES, "absent", type("Absent", (LlamaCpp,), {"module": "no_such_module"})())
    results = compare.compare(args, TINY)
    assert [(result.engine, result.failed, result.extrapolated) for result in results] == [("accelerate", None, False)]
    assert results[0].new_tokens == 4 * 16
    assert json.loads((tmp_path / "compare.json").read_text())[0]["engine"] == "accelerate"
    assert (tmp_path / "model-f16.gguf").exists()
    args.resume = True
    assert compare.compare(args, TINY) == results  # the very run: its seconds are the same
    args.limit = 3
    again = compare.compare(args, TINY)  # another job's results are none of this one's
    assert [result.new_tokens for result in again] == [3 * 16]
