"""A checkpoint's tensors by name, checked against the expected shape and counted off as they are used."""

from __future__ import annotations

from collections.abc import Iterable

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.matrices import SplitPair, TensorMatrix, TransposedMatrix, tensor_slice
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, TensorInfo

_PLAIN = ("F32", "F16", "BF16")
_NAMED = 6  # how many tensors an error lists


class TensorSource:
    """Hands out matrices and remembers which tensors were used; ``finish`` refuses the rest."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._used: set[str] = set()

    def has(self, names: Iterable[str], suffix: str = "") -> bool:
        return any(name + suffix in self.checkpoint.tensors for name in names)

    def has_linear(self, modules: Iterable[str]) -> bool:
        """Whether the weight of one of ``modules`` is stored."""
        return self.has(modules, ".weight")

    def tensor(self, names: Iterable[str], shape: tuple[int, ...]) -> TensorInfo:
        """The first stored one of ``names`` (full tensor names); its shape must be ``shape``."""
        names = tuple(names)
        for name in names:
            info = self.checkpoint.tensors.get(name)
            if info is not None:
                if info.shape != shape:
                    raise CheckpointError(
                        f"{self.checkpoint.root}: tensor {name!r} has shape {list(info.shape)}, but the model's "
                        f"configuration calls for {list(shape)}."
                    )
                self._used.add(name)
                return info
        other = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        raise CheckpointError(
            f"{self.checkpoint.root}: tensor {names[0]!r}{other} is missing. The checkpoint is incomplete; "
            "download it again."
        )

    def vector(self, names: Iterable[str], length: int) -> Matrix:
        """A stored vector (full tensor names) as a matrix of one row."""
        return self._plain(self.tensor(names, (length,)))

    def linear(self, modules: Iterable[str], rows: int, cols: int) -> Matrix:
        """The weight [rows, cols] of the first stored one of ``modules`` (names without ``.weight``)."""
        modules = tuple(modules)
        name = next((m for m in modules if m + ".weight" in self.checkpoint.tensors), modules[0]) + ".weight"
        info = self.checkpoint.tensors.get(name)
        if rows == 1 and info is not None and info.shape == (cols,):
            return self.vector([name], cols)
        return self._plain(self.tensor([f"{m}.weight" for m in modules], (rows, cols)))

    def stacked(self, names: Iterable[str], shape: tuple[int, ...], index: int) -> Matrix:
        """Entry ``index`` of a stored tensor (full names) of ``shape`` [entries, rows, cols] or [entries, length]."""
        return self._plain(tensor_slice(self.tensor(names, shape), index))

    def _plain(self, info: TensorInfo) -> Matrix:
        if self.checkpoint.format != "gguf" and info.encoding not in _PLAIN:
            raise UnsupportedError(
                f"{self.checkpoint.root}: tensor {info.name!r} is stored as {info.encoding}, which is not implemented "
                f"for it; only {', '.join(_PLAIN)} are."
            )
        return TensorMatrix(info)

    def stacked_halves(self, names: Iterable[str], shape: tuple[int, int, int], index: int) -> Matrix:
        """Entry ``index`` of a stacked, fused gate/up tensor [entries, 2 * I, cols], gate rows first, as a pair."""
        return SplitPair(self.stacked(names, shape, index))

    def halves(self, modules: Iterable[str], width: int, cols: int) -> Matrix:
        """A fused gate/up weight [2 * width, cols], gate rows first, as a pair."""
        return SplitPair(self.linear(modules, 2 * width, cols))

    def stacked_transposed(self, names: Iterable[str], shape: tuple[int, int, int], index: int) -> Matrix:
        """Entry ``index`` of a stored tensor [entries, cols, rows], as the matrix [rows, cols]."""
        return TransposedMatrix(self.stacked(names, shape, index))

    def ignore(self, names: Iterable[str]) -> None:
        """Count tensors as used without using them."""
        self._used.update(names)

    def finish(self) -> None:
        """CheckpointError if any tensor of the checkpoint has not been used."""
        unused = sorted(self.checkpoint.tensors.keys() - self._used)
        if unused:
            more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
            raise CheckpointError(
                f"{self.checkpoint.root}: the model has no place for {', '.join(unused[:_NAMED])}{more}. "
                "The weights do not belong to this configuration, or use an option that is not implemented."
            )
