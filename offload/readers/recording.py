"""A reader that lets another one read and tells a recorder how long each submission took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchgen_lite.offload.readers.protocol import Reader, ReaderStatistics, ReadPiece
from batchgen_lite.trace.recorder import Recorder


class RecordingReader:
    """See ``Reader``; what it does is what ``reader`` does."""

    def __init__(self, reader: Reader, recorder: Recorder) -> None:
        self.name = reader.name
        self.alignment = reader.alignment
        self._reader = reader
        self._recorder = recorder

    def submit(self, pieces: Sequence[ReadPiece], done: Callable[[BaseException | None], None]) -> None:
        if not pieces:
            self._reader.submit(pieces, done)
            return
        since = self._recorder.now()
        nbytes, file = sum(piece.nbytes for piece in pieces), pieces[0].file

        def finished(error: BaseException | None) -> None:
            if error is None:
                self._recorder.read(since, nbytes, file)
            done(error)

        self._reader.submit(pieces, finished)

    def statistics(self) -> ReaderStatistics:
        return self._reader.statistics()

    def close(self) -> None:
        self._reader.close()
