from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen_lite.errors import UsageError
from batchgen_lite.jobs.lock import JobLock, is_held, read_status

HOLD = "import sys; from batchgen_lite.jobs.lock import JobLock; from pathlib import Path; l = JobLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"  # noqa: E501


def test_a_second_lock_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.lock"
    lock = JobLock(path)
    with pytest.raises(UsageError, match=f"process {os.getpid()} on .* is already writing out.jsonl"):
        JobLock(path)
    lock.release()
    assert not path.exists()
    JobLock(path).release()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.lock"
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_held(path)
        with pytest.raises(UsageError, match=f"process {holder.pid}"):
            JobLock(path)
        holder.kill()
        holder.wait()
    assert path.exists()
    assert not is_held(path)
    JobLock(path).release()


def test_the_lock_tells_the_live_status(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert read_status(path) is None
    lock = JobLock(path)
    lock.publish({"done": 5, "text": "x" * 500})
    lock.publish({"done": 6})
    status = read_status(path)
    assert status is not None
    assert status["progress"] == {"done": 6}
    lock.release()
    lock.release()
