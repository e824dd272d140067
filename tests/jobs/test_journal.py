"""The journal's promise: what was flushed is there, a torn tail costs its frame only, and its size stays bounded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_lite.errors import StorageError
from batchgen_lite.jobs.done_table import DoneRow, Status
from batchgen_lite.jobs.journal import Journal
from batchgen_lite.runtime.interface import SampledToken

rows = st.integers(0, 5)
tokens = st.integers(0, 2**31 - 1)
logprobs = st.floats(allow_nan=False)
scored = st.tuples(tokens, logprobs, st.lists(st.tuples(tokens, logprobs), max_size=3))
places = st.tuples(st.integers(0, 2**40), st.integers(1, 2**20), st.sampled_from(Status))
events = st.one_of(
    st.tuples(st.just("token"), rows, tokens),
    st.tuples(st.just("scored"), st.integers(6, 8), scored),
    st.tuples(st.just("done"), st.integers(0, 8), places),
    st.tuples(st.just("forget"), st.integers(0, 8), st.none()),
    st.tuples(st.just("flush"), st.none(), st.none()),
)


def apply(journal: Journal, event: tuple) -> None:
    kind, row, value = event
    if kind == "token":
        journal.token(row, SampledToken(value), scored=False)
    elif kind == "scored":
        token, logprob, top = value
        journal.token(row, SampledToken(token, logprob, tuple(top)), scored=True)
    elif kind == "done":
        journal.finished(row, DoneRow(value[0], value[1], 77, value[2]))
    elif kind == "forget":
        journal.forget(row)
    else:
        journal.flush()


def state(journal: Journal) -> tuple:
    live = {row: tokens.sampled() for row, tokens in journal.live.items()}
    return live, list(journal.done.rows()), [journal.done.number(status) for status in Status]


@given(st.lists(events, max_size=40), st.sampled_from([0, 200, 1 << 20]))
def test_a_reopened_journal_says_what_was_noted(found: list[tuple], compact_above: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = Journal(path, compact_above=compact_above)
        for event in found:
            apply(journal, event)
        journal.flush()
        expected = state(journal)
        journal.close()
        again = Journal(path)
        assert state(again) == expected
        again.close()


@settings(max_examples=6)
@given(st.lists(events, min_size=3, max_size=8))
def test_a_tail_torn_at_any_byte_leaves_the_frames_before_it(found: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        states = {}
        journal = Journal(path)
        states[path.stat().st_size] = state(journal)
        for event in found:
            apply(journal, event)
            journal.flush()
            states[path.stat().st_size] = state(journal)
        journal.close()
        whole = path.read_bytes()
        for length in range(len(whole) + 1):
            path.write_bytes(whole[:length])
            healed = Journal(path)
            boundary = max((size for size in states if size <= length), default=min(states))
            assert state(healed) == states[boundary]
            apply(healed, ("token", 3, 9))
            healed.flush()
            expected = state(healed)
            healed.close()
            again = Journal(path)  # what follows a healed tail is read as well
            assert state(again) == expected
            again.close()


@given(st.data())
def test_a_damaged_byte_never_invents_anything(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = Journal(path)
        for token in range(20):
            journal.token(token % 3, SampledToken(token), scored=False)
            journal.flush()
        live = {row: list(tokens.tokens) for row, tokens in journal.live.items()}
        journal.close()
        damaged = bytearray(path.read_bytes())
        place = data.draw(st.integers(8, len(damaged) - 1))
        damaged[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(bytes(damaged))
        again = Journal(path)
        for row, tokens in again.live.items():
            assert list(tokens.tokens) == live[row][: len(tokens.tokens)]
        again.close()


def test_an_entry_whose_record_is_not_there_does_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.token(4, SampledToken(1), scored=False)
    journal.finished(4, DoneRow(0, 10, 5, Status.STOPPED))
    journal.flush()
    journal.close()
    again = Journal(tmp_path / "journal", lambda entry: False)
    assert 4 not in again.done
    assert list(again.live[4].tokens) == [1]
    again.close()


def test_the_file_stays_near_the_size_of_what_is_live(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, compact_above=4096)
    largest = 0
    for row in range(200):
        for token in range(50):
            journal.token(row, SampledToken(token), scored=False)
            journal.flush()
        journal.finished(row, DoneRow(row * 10, 10, 1, Status.CUT))
        largest = max(largest, path.stat().st_size)
    journal.flush()
    journal.close()
    assert largest < 4096 + 200 * 40 + 50 * 40
    assert len(Journal(path).done) == 200


def test_nothing_is_written_before_flush_and_everything_after(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    before = path.stat().st_size
    for row in range(300):
        journal.token(row, SampledToken(1), scored=False)
    assert path.stat().st_size == before
    journal.flush()
    assert path.stat().st_size == before + 9 + 300 * 8  # one frame for a sweep's tokens
    journal.close()


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("something of the user's own")
    with pytest.raises(StorageError, match="--overwrite"):
        Journal(path)
    assert path.read_text() == "something of the user's own"
