"""The final file: finished records put into order and into place, all at once or not at all."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.jobs.done_table import DoneRow, DoneTable, Status
from batchgen_lite.jobs.lines import read_lines
from batchgen_lite.jobs.manifest import sync_directory
from batchgen_lite.jobs.sink import ResultSink
from batchgen_lite.jobs.strict_json import parse_object

_BUFFER = 4 << 20


def assemble(sink: ResultSink, fresh: Path, output: Path, *, unordered: bool) -> None:
    """Write every finished record to ``fresh``, in input order or in the order in which rows finished, then rename it
    to ``output``. StorageError leaves ``output`` and the finished work as they were."""
    try:
        with fresh.open("wb", buffering=_BUFFER) as file:
            for entry in _in_order(sink.journal.done, unordered):
                file.write(sink.read(entry))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, output)
        sync_directory(output.parent)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {output}: {error.strerror}; all rows are finished and saved: free space, then run the same "
            "command with --resume"
        ) from error
    except StorageError:
        fresh.unlink(missing_ok=True)
        raise


def _in_order(done: DoneTable, unordered: bool) -> Iterator[DoneRow]:
    entries = (entry for _, entry in done.rows())
    return iter(sorted(entries, key=lambda entry: entry.offset)) if unordered else entries


def index_output(output: Path) -> DoneTable:
    """Where each row's record lies in a complete file in input order. UsageError if it is no such file."""
    done = DoneTable()
    try:
        with output.open("rb") as file:
            for row, line in enumerate(read_lines(file)):
                data = line.data + b"\n"
                done.set(row, DoneRow(line.offset, len(data), zlib.crc32(data), _status(parse_object(line.data))))
    except OSError as error:
        raise StorageError(f"cannot read {output}: {error.strerror}") from error
    except Exception as error:
        raise UsageError(f"{output} was changed since it was written ({error}); start again with --overwrite") from None
    return done


def _status(record: dict[str, object]) -> Status:
    response = record.get("response")
    if isinstance(response, dict):
        if response.get("status_code") != 200:
            return Status.FAILED
        record = response["body"]["choices"][0]
    elif record.get("error") is not None:
        return Status.FAILED
    return Status.CUT if record.get("finish_reason") == "length" else Status.STOPPED
