"""The index of a job's rows: where each line lies and how large it will be, about 40 bytes a row. No text is kept."""

from __future__ import annotations

import zlib
from array import array
from pathlib import Path

from batchgen_lite.errors import StorageError
from batchgen_lite.jobs.envelope import Shape
from batchgen_lite.jobs.lines import RawLine
from batchgen_lite.runtime.interface import RequestSize


class Rows:
    """Rows of the input at ``path``, in input order. A row is a line that is not blank; rows count from 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise StorageError(f"cannot read the input {path}: {error.strerror}") from error
        self._offset = array("Q")
        self._length = array("Q")
        self._number = array("Q")
        self._crc = array("I")
        self._prompt_tokens = array("I")
        self._max_tokens = array("I")
        self._shape = bytearray()
        self._bad = bytearray()

    def __len__(self) -> int:
        return len(self._offset)

    def close(self) -> None:
        self._file.close()

    def add(self, line: RawLine, shape: Shape, size: RequestSize | None) -> None:
        """``size`` is None for a line that cannot be answered: its error is found again when it is written."""
        self._offset.append(line.offset)
        self._length.append(len(line.data))
        self._number.append(line.number)
        self._crc.append(zlib.crc32(line.data))
        self._prompt_tokens.append(size.prompt_tokens if size else 0)
        self._max_tokens.append(size.max_tokens if size else 0)
        self._shape.append(shape)
        self._bad.append(size is None)

    def line(self, row: int) -> RawLine:
        """Read a row's line again. StorageError if the input is no longer what it was when it was indexed."""
        length, offset = self._length[row], self._offset[row]
        data = bytearray()
        try:
            self._file.seek(offset)
            while len(data) < length and (piece := self._file.read(length - len(data))):
                data += piece
        except OSError as error:
            raise StorageError(f"cannot read the input {self.path} at byte {offset}: {error.strerror}") from error
        if zlib.crc32(data) != self._crc[row]:
            raise StorageError(
                f"the input {self.path} changed while the job ran (line {self._number[row]}); put the old content back "
                "and run the same command with --resume, or start again with --overwrite"
            )
        return RawLine(self._number[row], offset, bytes(data))

    def number(self, row: int) -> int:
        """Physical line number, from 1."""
        return self._number[row]

    def shape(self, row: int) -> Shape:
        return Shape(self._shape[row])

    def bad(self, row: int) -> bool:
        return bool(self._bad[row])

    def size(self, row: int) -> RequestSize:
        return RequestSize(self._prompt_tokens[row], self._max_tokens[row])
