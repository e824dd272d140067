"""Threads that compute experts side by side, and the order in which their results are taken."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint

from batchgen_lite.models.load import load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.runtime import expert_workers
from batchgen_lite.runtime.expert_workers import ExpertWorkers, InOrder, workers_for


@pytest.fixture
def workers() -> Iterator[ExpertWorkers]:
    made = ExpertWorkers(3)
    yield made
    made.close()


def nothing() -> None:
    pass


def test_steps_are_taken_in_the_order_of_their_numbers_whoever_brings_them() -> None:
    for seed in range(20):
        numbers = list(range(60))
        random.Random(seed).shuffle(numbers)
        order, taken, running = InOrder(), list[int](), threading.Lock()

        def step(number: int, taken: list[int] = taken, running: threading.Lock = running) -> None:
            assert running.acquire(blocking=False), "two steps at a time"
            taken.append(number)
            running.release()

        def bring(mine: list[int], order: InOrder = order) -> None:
            for number in mine:
                order.bring(number, lambda number=number: step(number))  # type: ignore[misc]

        threads = [threading.Thread(target=bring, args=(numbers[part::4],)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert taken == list(range(60))


def test_work_is_done_by_all_workers_each_with_one_core(workers: ExpertWorkers) -> None:
    torch.set_num_threads(2)
    together = threading.Barrier(3, timeout=10)
    seen: list[tuple[int, int, bool]] = []

    def work(worker: int) -> None:
        together.wait()  # ends only if three run at a time
        seen.append((worker, torch.get_num_threads(), torch.is_inference_mode_enabled()))

    done: list[int] = []
    for _ in range(6):
        workers.submit(work, lambda: done.append(1))
    workers.join()
    assert {worker for worker, _, _ in seen} == {0, 1, 2}
    assert {(threads, inference) for _, threads, inference in seen} == {(1, True)}
    assert len(done) == 6
    assert torch.get_num_threads() == 2  # the caller's own, which its operations still use


def test_the_first_error_is_raised_where_the_work_was_ordered_and_the_next_work_is_done(
    workers: ExpertWorkers,
) -> None:
    ran: list[str] = []
    done: list[int] = []

    def fail(worker: int) -> None:
        raise MemoryError("no room")

    workers.submit(fail, lambda: done.append(0))
    while not workers.failed:
        time.sleep(0.001)
    workers.submit(lambda _: ran.append("behind it"), lambda: done.append(1))
    with pytest.raises(MemoryError, match="no room"):
        workers.join()
    assert (ran, done) == ([], [0, 1])  # nothing more was begun, but everything was given back
    assert not workers.failed
    workers.submit(lambda _: ran.append("again"), nothing)
    workers.join()
    assert ran == ["again"]


def test_they_tell_since_when_they_are_idle(workers: ExpertWorkers) -> None:
    let = threading.Event()
    workers.submit(lambda _: let.wait(10) and None, nothing)
    assert workers.idle_since() is None
    before = time.perf_counter()
    let.set()
    workers.join()
    since = workers.idle_since()
    assert since is not None
    assert before <= since <= time.perf_counter()


def test_threads_end_with_their_owner() -> None:
    before = threading.active_count()
    made = ExpertWorkers(2)
    made.close()  # never used: nothing to end
    made = ExpertWorkers(2)
    made.submit(lambda _: None, nothing)
    made.join()
    assert threading.active_count() == before + 2
    made.close()
    made.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(("family", "threads", "expected"), [("qwen3_moe", 4, 4), ("qwen3_moe", 1, 1), ("llama", 4, 1)])
def test_how_many(family: str, threads: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(family, tmp_path)
    model = load_model(tmp_path)
    modules = modules_of(model.spec, model.weights)
    monkeypatch.setattr(expert_workers, "USES_ONEDNN", True)
    assert workers_for(modules, threads) == expected
    with monkeypatch.context() as packed:
        packed.setattr(expert_workers, "cheap", lambda tile: False)  # decoding takes memory of its own
        assert workers_for(modules, threads) == 1
    monkeypatch.setattr(expert_workers, "USES_ONEDNN", False)  # MKL's bits depend on its threads
    assert workers_for(modules, threads) == 1
