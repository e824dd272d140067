"""Whole jobs over the stub engine: every line in, every line out, whatever happens."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from stub_job import read_records, run_job, write_lines

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.runtime.stub import StubEngine, StubOptions

CHAT = {"method": "POST", "url": "/v1/chat/completions"}
HELLO = [{"role": "user", "content": "hello"}]


def prompts(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"row-{i}", "prompt": f"prompt {i}", "max_tokens": 40, **fields} for i in range(count)]


class StoppingEngine(StubEngine):
    """Stops itself, as at Ctrl-C, after some sweeps."""

    def __init__(self, sweeps: int, options: StubOptions | None = None) -> None:
        super().__init__(options)
        self.sweeps = sweeps

    async def _pause(self) -> None:
        await super()._pause()
        if self._progress.sweeps + 1 >= self.sweeps:
            self.request_stop()


def mixed_lines() -> list[object]:
    """60 lines: every bad shape among good ones. Good ones have ids, so that their place does not matter."""
    bad: list[object] = [
        b"not json",
        b'{"prompt": "cut off',
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "x", "top_k": ' + b"1" * 5000 + b"}",
        b'{"prompt": "x", "prompt": "y"}',
        b"[]",
        b"\xef\xbb\xbf{}",
        {},
        {"prompt": 7},
        {"prompt": "x", "temprature": 1},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "max_tokens": True},
        {"prompt": "x", "max_tokens": 10**25},
        {"prompt": "x", "stream": True},
        {"prompt": "x" * 5000},
        {"prompt": "x", "custom_id": "good-0"},
        {"prompt": "x", "custom_id": {}},
        {"prompt": ""},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"token_ids": [1, 99999]},
        {**CHAT, "custom_id": "bad-1", "body": {"messages": HELLO, "tools": [{}]}},
        {**CHAT, "custom_id": "bad-2", "url": "/v1/embeddings", "body": {"input": "x"}},
        {**CHAT, "custom_id": "bad-3", "method": "GET", "body": {"messages": HELLO}},
        {**CHAT, "custom_id": "bad-4"},
        {**CHAT, "custom_id": "good-1", "body": {"messages": HELLO}},
        {**CHAT, "custom_id": "bad-5", "body": {"messages": HELLO, "n": 3}},
    ]
    good: list[object] = []
    for i in range(10):
        good.append({"custom_id": f"good-{3 * i}", "prompt": f"p\u2028{i}", "note": [i]})
        good.append({**CHAT, "custom_id": f"good-{3 * i + 1}", "body": {"messages": HELLO, "max_tokens": 5 + i}})
        good.append({"custom_id": f"good-{3 * i + 2}", "text": "hi", "temperature": 0.5, "seed": i, "logprobs": 1})
    lines: list[object] = []
    for position, one in enumerate(good):
        lines += [one, bad[position]]
    return lines


def test_sixty_mixed_lines(tmp_path: Path) -> None:
    lines = mixed_lines()
    source = write_lines(tmp_path / "in.jsonl", b"", *lines[:30], b"  ", *lines[30:])
    counts = run_job(source, tmp_path / "out.jsonl")
    assert (counts.total, counts.ok, counts.failed) == (60, 30, 30)
    out = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    only_good = write_lines(tmp_path / "good.jsonl", *lines[::2])
    run_job(only_good, tmp_path / "good-out.jsonl")
    alone = (tmp_path / "good-out.jsonl").read_bytes().splitlines(keepends=True)
    for position in range(30):  # the place is the only thing that may differ
        moved = alone[position].replace(b'"index": %d, ' % position, b'"index": %d, ' % (2 * position), 1)
        assert out[2 * position] == moved
    for position, line in enumerate(out[1::2]):
        record = json.loads(line)
        error = record.get("error") or record["response"]["body"]["error"]
        row = 2 * position + 1
        assert error["line"] == row + 2 + (row >= 30)
        assert set(error) == {"code", "message", "type", "param", "line"}
    codes = {json.loads(line).get("error", None) and json.loads(line)["error"]["code"] for line in out[1::2]}
    assert {"invalid_json", "invalid_request", "unsupported_parameter", "duplicate_id"} <= codes
    assert {"template_error", "unsupported_content", "context_length_exceeded"} <= codes


def test_lines_that_show_no_shape_take_that_of_the_line_before(tmp_path: Path) -> None:
    chat = {**CHAT, "custom_id": "a", "body": {"messages": HELLO, "max_tokens": 3}}
    source = write_lines(tmp_path / "in.jsonl", chat, b"broken")
    run_job(source, tmp_path / "out.jsonl")
    assert read_records(tmp_path / "out.jsonl")[1]["response"]["body"]["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("stops", [[1], [7], [3, 9, 20], [30, 1]])
def test_a_resumed_job_has_the_same_bytes(tmp_path: Path, stops: list[int]) -> None:
    lines = [*prompts(30, logprobs=1), b"bad", *prompts(20)[10:15]]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    run_job(source, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    for stop in stops:
        counts = run_job(source, output, resume=True, engine=StoppingEngine(stop, StubOptions(batch=6)))
        assert counts.left > 0
        assert not output.exists()
    run_job(source, output, resume=True, engine=StubEngine(StubOptions(batch=3)))
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))
    assert left == ["out.jsonl", "out.jsonl.manifest.json"]


def test_no_token_is_generated_twice(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(20))
    whole, first, second = StubEngine(), StoppingEngine(9), StubEngine()
    run_job(source, tmp_path / "whole.jsonl", engine=whole)
    run_job(source, tmp_path / "out.jsonl", engine=first)
    run_job(source, tmp_path / "out.jsonl", engine=second, resume=True)
    decoded = [engine.progress().tokens_decoded for engine in (whole, first, second)]
    assert decoded[0] == decoded[1] + decoded[2]
    assert decoded[1] > 0


def test_a_row_cut_off_between_its_last_token_and_its_record_needs_no_engine(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", *prompts(3, max_tokens=5, ignore_eos=True), {**prompts(6)[5], "ignore_eos": True}
    )
    run_job(source, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    run_job(source, output, engine=StoppingEngine(7))
    partial = tmp_path / "out.jsonl.partial"
    os.truncate(partial, 0)  # a power loss that kept the journal only
    engine = StubEngine()
    run_job(source, output, resume=True, engine=engine)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert engine.progress().rows_total == 1


def test_a_partial_file_torn_at_every_byte_is_healed(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        *prompts(4, max_tokens=2, ignore_eos=True),
        {"prompt": "z", "max_tokens": 50, "ignore_eos": True},
    )
    run_job(source, tmp_path / "whole.jsonl")
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    run_job(source, output, engine=StoppingEngine(4))
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("out.jsonl.*")}
    for length in range(len(kept[partial.name]) + 1):
        for name, data in kept.items():
            (tmp_path / name).write_bytes(data)
        os.truncate(partial, length)
        output.unlink(missing_ok=True)
        run_job(source, output, resume=True)
        assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_record_changed_on_disk_is_made_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(10))
    run_job(source, tmp_path / "whole.jsonl")
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    run_job(source, output, engine=StoppingEngine(25, StubOptions(batch=4)))
    data = partial.read_bytes()
    partial.write_bytes(data[:20] + b"#" + data[21:])
    run_job(source, output, resume=True)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_resume_refuses_another_job_and_says_what_differs(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(5))
    other = write_lines(tmp_path / "other.jsonl", *prompts(6))
    output = tmp_path / "out.jsonl"
    run_job(source, output, engine=StoppingEngine(3))
    for changed, words in [
        ({"source": other}, "input_sha256: was"),
        ({"seed": 8}, "seed: was 7, is 8"),
        ({"sampling": {"top_k": 5}}, "sampling.top_k: was null, is 5"),
        ({"on_long": "truncate-left"}, 'on_long: was "error", is "truncate-left"'),
        ({"context": 99}, 'model.context: was "4096", is "99"'),
        ({"engine_identity": {"kv_dtype": "int8"}}, 'engine.kv_dtype: was null, is "int8"'),
        ({"limit": 2}, "--limit 2 is below the 5 rows"),
    ]:
        arguments = {"source": source, **changed}
        with pytest.raises(UsageError, match=words.replace("(", r"\(")):
            run_job(output=output, resume=True, **arguments)
    run_job(source, output, resume=True)
    assert len(read_records(output)) == 5


def test_the_drawn_seed_is_kept(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(8))
    output = tmp_path / "out.jsonl"
    run_job(source, output, seed=None, engine=StoppingEngine(4))
    seed = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["base_seed"]
    run_job(source, output, seed=None, resume=True)
    run_job(source, tmp_path / "same.jsonl", seed=seed)
    assert output.read_bytes() == (tmp_path / "same.jsonl").read_bytes()
    run_job(source, tmp_path / "drawn.jsonl", seed=None)
    assert output.read_bytes() != (tmp_path / "drawn.jsonl").read_bytes()


def test_seeded_rows_are_the_same_alone_among_others_and_in_another_order(tmp_path: Path) -> None:
    seeded = {"custom_id": "s", "prompt": "p", "seed": 5, "max_tokens": 30}
    others = [{"custom_id": i, "prompt": f"q{i}"} for i in range(500)]
    texts = []
    for name, lines in [
        ("alone", [seeded]),
        ("among", [*others[:250], seeded, *others[250:]]),
        ("last", [*others, seeded]),
    ]:
        run_job(write_lines(tmp_path / name, *lines), tmp_path / f"{name}.out")
        texts += [record["text"] for record in read_records(tmp_path / f"{name}.out") if record["custom_id"] == "s"]
    assert len(texts) == 3
    assert len(set(texts)) == 1


def test_limit_is_a_trial_that_resume_goes_on_from(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(10))
    output = tmp_path / "out.jsonl"
    run_job(source, output, limit=4)
    first = output.read_bytes()
    assert first.count(b"\n") == 4
    engine = StubEngine()
    run_job(source, output, resume=True, engine=engine)
    assert engine.progress().rows_total == 6
    run_job(source, tmp_path / "whole.jsonl")
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert output.read_bytes().startswith(first)


def test_retry_errors_tries_failed_rows_only(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(6), b"bad")
    output = tmp_path / "out.jsonl"
    counts = run_job(source, output, engine=StubEngine(StubOptions(bad_logits_row=2)))
    assert (counts.ok, counts.failed) == (5, 2)
    assert read_records(output)[2]["error"]["code"] == "non_finite_logits"
    engine = StubEngine()
    counts = run_job(source, output, resume=True, engine=engine)
    assert (counts.ok, counts.failed, engine.progress().rows_total) == (5, 2, 0)
    counts = run_job(source, output, resume=True, retry_errors=True, engine=engine)
    assert (counts.ok, counts.failed, engine.progress().rows_total) == (6, 1, 1)
    run_job(source, tmp_path / "whole.jsonl")
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_one_rows_failure_leaves_the_others_alone(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(6))
    run_job(source, tmp_path / "whole.jsonl")
    run_job(source, tmp_path / "out.jsonl", engine=StubEngine(StubOptions(bad_logits_row=3)))
    whole, out = read_records(tmp_path / "whole.jsonl"), read_records(tmp_path / "out.jsonl")
    assert [row for row in range(6) if whole[row] != out[row]] == [3]


def test_unordered_has_the_same_records_in_the_order_of_finishing(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(20))
    run_job(source, tmp_path / "ordered.jsonl")
    run_job(source, tmp_path / "out.jsonl", unordered=True)
    ordered, out = read_records(tmp_path / "ordered.jsonl"), read_records(tmp_path / "out.jsonl")
    assert out != ordered
    assert sorted(out, key=lambda record: record["index"]) == ordered


def test_an_input_changed_under_the_run_stops_it(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(20))
    data = source.read_bytes()

    class Meddling(StubEngine):
        async def _pause(self) -> None:
            await super()._pause()
            if self._progress.sweeps == 3:
                source.write_bytes(data.replace(b"prompt 19", b"prompt 91"))

    with pytest.raises(StorageError, match=r"changed while the job ran \(line 20\)"):
        run_job(source, tmp_path / "out.jsonl", engine=Meddling(StubOptions(batch=2)))
    source.write_bytes(data)
    run_job(source, tmp_path / "out.jsonl", resume=True)
    run_job(source, tmp_path / "whole.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("suffix", [".partial", ".journal"])
def test_a_full_disk_stops_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(12))
    run_job(source, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    write = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(suffix) and offset + len(data) > 900:
            if offset >= 900:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data[: 900 - offset], offset)  # what still fits is written: a torn piece
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        run_job(source, output)
    monkeypatch.undo()
    assert not output.exists()
    run_job(source, output, resume=True)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_disk_full_at_the_very_end_loses_nothing(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(12))
    run_job(source, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    run_job(source, output, engine=StoppingEngine(5))
    (tmp_path / "out.jsonl.new").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="all rows are finished and saved"):
        run_job(source, output, resume=True)
    assert not output.exists()
    engine = StubEngine()
    run_job(source, output, resume=True, engine=engine)
    assert engine.progress().rows_total == 0
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_an_engine_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *prompts(3), b"bad")
    with pytest.raises(StorageError):
        run_job(source, tmp_path / "out.jsonl", engine=StubEngine(StubOptions(fail_sweep=1)))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_lines_of_tens_of_megabytes(tmp_path: Path) -> None:
    blob = "é{[" * 5_000_000
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "a", "max_tokens": 2, "blob": blob}, *prompts(1))
    assert run_job(source, tmp_path / "out.jsonl").ok == 2
    assert read_records(tmp_path / "out.jsonl")[0]["blob"] == blob


def test_an_empty_input_gives_an_empty_output(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", b"", b"  ")
    assert run_job(source, tmp_path / "out.jsonl").total == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""
