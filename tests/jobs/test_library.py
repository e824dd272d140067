"""The library: the command's engine and answers for Python callers."""

from __future__ import annotations

import asyncio
import doctest
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from stub_job import read_records, run_job, write_lines

import batchgen_lite
from batchgen_lite import LLM, Result, SamplingParams, llm
from batchgen_lite.errors import ParameterError, UsageError
from batchgen_lite.runtime.interface import Progress, RequestSource, RunSummary
from batchgen_lite.runtime.stub import StubEngine, StubOptions

PROMPTS = [f"prompt {i}" for i in range(20)]


def stub(**options: Any) -> LLM:
    return LLM("any", engine="stub", **options)


def with_engine(engine: StubEngine) -> LLM:
    model = stub()
    model._engine = engine
    return model


@pytest.mark.parametrize("module", [batchgen_lite, llm])
def test_examples_run(module: Any) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_what_the_package_exports() -> None:
    assert batchgen_lite.__all__ == sorted(batchgen_lite.__all__)
    assert dir(batchgen_lite) == batchgen_lite.__all__
    for name in batchgen_lite.__all__:
        assert getattr(batchgen_lite, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = batchgen_lite.Nothing


def test_results_come_in_order_and_as_the_command_writes_them(tmp_path: Path) -> None:
    with stub(seed=7) as model:
        results = model.generate(PROMPTS, {"max_tokens": 20, "logprobs": 1})
    run_job(
        write_lines(tmp_path / "in", *({"prompt": p} for p in PROMPTS)),
        tmp_path / "out",
        sampling={"max_tokens": 20, "logprobs": 1},
    )
    assert [result.record() for result in results] == read_records(tmp_path / "out")
    assert [result.index for result in results] == list(range(20))
    assert all(len(result.token_ids) == result.usage.completion_tokens for result in results)


def test_prompts_of_every_kind() -> None:
    with stub() as model:
        one = model.generate("hello", SamplingParams(temperature=0))
        ids, line = model.generate([list(b"hello"), {"prompt": "hello", "custom_id": "x"}], {"temperature": 0})
        assert model.generate([]) == []
    assert one[0].text == ids.text == line.text
    assert line.custom_id == "x"


def test_a_prompts_error_is_its_result() -> None:
    with stub() as model:
        good, empty, long, bad = model.generate(["a", "", "x" * 5000, {"prompt": "a", "top_p": 7}])
        [chat] = model.chat([[{"role": "wizard", "content": "x"}]])
    assert good.ok
    assert [r.error.code if r.error else None for r in (empty, long, bad, chat)] == [
        "invalid_request",
        "context_length_exceeded",
        "invalid_request",
        "template_error",
    ]
    assert empty.record()["error"]["message"].startswith("the prompt is empty")


def test_the_callers_own_mistakes_are_raised() -> None:
    with stub() as model:
        with pytest.raises(ParameterError, match="did you mean 'temperature'"):
            model.generate(["a"], {"temprature": 1})
        with pytest.raises(UsageError, match="2 sampling parameters for 1 prompts"):
            model.generate(["a"], [{}, {}])
    with pytest.raises(UsageError, match="closed"):
        model.generate(["a"])
    with pytest.raises(UsageError, match="kv_dtype is 'int4': it must be one of auto, float32, bfloat16"):
        stub(kv_dtype="int4")
    with pytest.raises(UsageError, match="--disk limits the spill file"):
        stub(disk="1GiB")
    with pytest.raises(UsageError, match="on_long"):
        stub(on_long="shrug")


def test_sampling_for_each_prompt_and_precedence() -> None:
    with stub() as model:
        wishes = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2)]
        assert [r.usage.completion_tokens for r in model.generate(["a", "b"], wishes)] == [1, 2]
        own = {"prompt": "a", "max_tokens": 4}
        assert model.generate([own], wishes[0])[0].usage.completion_tokens == 4


def test_seeds() -> None:
    with stub(seed=3) as fixed, stub() as drawn:
        assert fixed.generate(PROMPTS) == fixed.generate(PROMPTS)
        assert drawn.generate(PROMPTS) != drawn.generate(PROMPTS)
        seeded = {"prompt": "p", "seed": 9}
        assert drawn.generate([seeded])[0].text == drawn.generate([*PROMPTS, seeded])[-1].text


def test_generate_works_inside_a_running_loop() -> None:
    async def notebook_cell() -> list[Result]:
        with stub() as model:
            return model.generate(PROMPTS)

    assert len(asyncio.run(notebook_cell())) == 20


def test_stream_yields_as_rows_finish() -> None:
    lines = [{"prompt": "p", "max_tokens": n, "ignore_eos": True} for n in (9, 3, 6)]

    async def collect() -> list[int]:
        with stub() as model:
            return [result.index async for result in model.stream([*lines, ""])]

    assert asyncio.run(collect()) == [3, 1, 2, 0]


def test_leaving_a_stream_stops_its_run_and_not_the_next() -> None:
    async def leave() -> tuple[int, int, RunSummary | None]:
        with with_engine(StubEngine(StubOptions(batch=1, step_seconds=0.001))) as model:
            stream = model.stream(PROMPTS, {"ignore_eos": True, "max_tokens": 5})
            first = await anext(stream)
            await stream.aclose()
            done = model._engine.progress().rows_done
            return first.index, done, (model.generate(["a"]), model.last_run)[1]

    index, done, last = asyncio.run(leave())
    assert index == 0
    assert done < 20
    assert last is not None
    assert not last.stopped_early


def test_an_engines_failure_is_raised_where_results_are_awaited() -> None:
    async def collect() -> list[Result]:
        with with_engine(StubEngine(StubOptions(fail_sweep=3))) as model:
            return [result async for result in model.stream(PROMPTS)]

    with pytest.raises(batchgen_lite.errors.StorageError):
        asyncio.run(collect())
    with with_engine(StubEngine(StubOptions(fail_sweep=3))) as model, pytest.raises(batchgen_lite.errors.StorageError):
        model.generate(PROMPTS)


def test_one_run_at_a_time() -> None:
    class Watched(StubEngine):
        running = most = 0

        async def run(self, source: RequestSource) -> RunSummary:
            Watched.running += 1
            Watched.most = max(Watched.most, Watched.running)
            try:
                return await super().run(source)
            finally:
                Watched.running -= 1

    with with_engine(Watched()) as model:
        threads = [threading.Thread(target=model.generate, args=(PROMPTS,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert Watched.most == 1


def test_progress_is_reported() -> None:
    seen: list[Progress] = []
    with stub() as model:
        model.generate(PROMPTS, on_progress=seen.append)
    assert seen
    assert seen[-1].rows_total == 20


def test_one_conversation_alone_is_a_batch_of_one() -> None:
    turns = [{"role": "user", "content": "hello"}]
    with stub() as model:
        (alone,) = model.chat(turns, SamplingParams(temperature=0, max_tokens=6))
        (listed,) = model.chat([turns], SamplingParams(temperature=0, max_tokens=6))
        assert alone.text == listed.text
        assert model.chat([]) == []


def sweeps_in(trace: Path) -> int:
    return sum(event.get("cat") == "sweep" for event in json.loads(trace.read_text())["traceEvents"])


def test_a_trace_and_a_report_of_all_calls_are_written_at_the_end(tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.json", tmp_path / "report.html"
    with stub(trace=trace, report=str(report)) as model:
        sweeps = 0
        for prompts in (PROMPTS, ["one more"]):
            model.generate(prompts, {"max_tokens": 5, "ignore_eos": True})
            assert model.last_run is not None
            sweeps += model.last_run.sweeps
        assert not trace.exists()
    assert sweeps_in(trace) == sweeps > 0
    page = report.read_text()
    assert "<th>calls</th><td>2</td>" in page
    assert 'id="plot-batch"' in page


def test_a_call_that_fails_leaves_its_trace_and_no_call_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.json"
    with stub(trace=trace):
        pass
    assert not trace.exists()
    monkeypatch.setenv("BATCHGEN_STUB", json.dumps({"fail_sweep": 3}))
    with stub(trace=trace) as model, pytest.raises(batchgen_lite.errors.StorageError):
        model.generate(PROMPTS)
    assert sweeps_in(trace) == 2


def test_a_trace_that_cannot_be_is_refused_at_once_and_one_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.json or \.json\.gz"):
        stub(trace=tmp_path / "trace.txt")
    folder = tmp_path / "gone"
    folder.mkdir()
    model = stub(trace=folder / "trace.json")
    model.generate("a")
    folder.rmdir()
    with pytest.warns(RuntimeWarning, match=r"trace\.json could not be written: No such file or directory"):
        model.close()
