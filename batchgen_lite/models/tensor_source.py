"""A checkpoint's tensors by name, checked against the expected shape and counted off as they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.matrices import (
    SplitPair,
    TensorMatrix,
    TransposedMatrix,
    read_dense,
    tensor_slice,
)
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.quantisation import Scheme, parse_scheme
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, TensorInfo

_PLAIN = ("F32", "F16", "BF16")
_NAMED = 6  # how many tensors an error lists


class TensorSource:
    """Hands out matrices and remembers which tensors were used; ``finish`` refuses the rest.

    A *module* is a weight's name without ``.weight``: quantised checkpoints store several tensors for one. Wherever
    several names are given, the first stored one is taken.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._used: set[str] = set()
        settings = checkpoint.config.get("quantization_config")
        self._scheme: Scheme | None = None if settings is None else parse_scheme(settings)

    def has(self, names: Iterable[str], suffix: str = "") -> bool:
        """Whether one of the tensors is stored."""
        return any(name + suffix in self.checkpoint.tensors for name in names)

    def has_linear(self, modules: Iterable[str]) -> bool:
        """Whether the weight of one of ``modules`` is stored."""
        return any(self._parts(module) for module in modules)

    def is_packed(self, modules: Iterable[str]) -> bool:
        """Whether the stored one of ``modules`` is quantised, with tensors of its own for scales."""
        return next((len(parts) > 1 for module in modules if (parts := self._parts(module))), False)

    def tensor(self, names: Iterable[str], shape: tuple[int, ...]) -> TensorInfo:
        """A stored tensor by its full name; its shape must be ``shape``."""
        names = tuple(names)
        name = next((name for name in names if name in self.checkpoint.tensors), None)
        if name is None:
            raise self._missing(names)
        info = self.checkpoint.tensors[name]
        if info.shape != shape:
            raise self._misshapen(name, info.shape, shape)
        self._used.add(name)
        return info

    def vector(self, names: Iterable[str], length: int) -> Matrix:
        """A stored vector by its full name, as a matrix of one row."""
        return self._plain(self.tensor(names, (length,)))

    def blocks(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A matrix stored in rows of blocks, by its full name: what ``pack`` writes."""
        return TensorMatrix(self.tensor([name], shape))

    def linear(self, modules: Iterable[str], rows: int, cols: int) -> Matrix:
        """The weight [rows, cols] of a module, quantised or not."""
        modules = tuple(modules)
        module = next((module for module in modules if self._parts(module)), None)
        if module is None:
            raise self._missing([f"{module}.weight" for module in modules])
        parts = self._parts(module)
        if len(parts) > 1:
            return self._packed(module, parts, rows, cols)
        if rows == 1 and self.checkpoint.tensors[parts[0]].shape == (cols,):
            return self.vector(parts, cols)
        return self._plain(self.tensor(parts, (rows, cols)))

    def halves(self, modules: Iterable[str], width: int, cols: int) -> Matrix:
        """A fused gate/up weight [2 * width, cols], gate rows first, as a pair."""
        return SplitPair(self.linear(modules, 2 * width, cols))

    def stacked(self, names: Iterable[str], shape: tuple[int, ...], index: int) -> Matrix:
        """Entry ``index`` of a stored tensor (full name) of ``shape`` [entries, rows, cols] or [entries, length]."""
        return self._plain(tensor_slice(self.tensor(names, shape), index))

    def stacked_transposed(self, names: Iterable[str], shape: tuple[int, int, int], index: int) -> Matrix:
        """Entry ``index`` of a stored tensor (full name) [entries, cols, rows], as the matrix [rows, cols]."""
        return TransposedMatrix(self.stacked(names, shape, index))

    def stacked_linear(self, modules: Iterable[str], shape: tuple[int, int, int], index: int) -> Matrix:
        """Entry ``index`` of the stacked weight [entries, rows, cols] of a module, quantised or not."""
        modules = tuple(modules)
        for module in modules:
            parts = self._parts(module)
            if len(parts) > 1:
                entries = self.checkpoint.tensors[parts[0]].shape[:1]
                if entries != shape[:1]:
                    raise self._misshapen(parts[0], entries, shape[:1])
                return self._packed(module, parts, shape[1], shape[2], index)
        return self.stacked([*modules, *(f"{module}.weight" for module in modules)], shape, index)

    def ignore(self, names: Iterable[str]) -> None:
        """Count tensors as used without using them."""
        self._used.update(names)

    def finish(self) -> None:
        """CheckpointError if any tensor of the checkpoint has not been used."""
        unused = sorted(self.checkpoint.tensors.keys() - self._used)
        unused = [name for name in unused if not self._is_zero_bias(name)]
        if unused:
            more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
            raise CheckpointError(
                f"{self.checkpoint.root}: the model has no place for {', '.join(unused[:_NAMED])}{more}. "
                "The weights do not belong to this configuration, or use an option that is not implemented."
            )

    def _parts(self, module: str) -> tuple[str, ...]:
        """The stored tensors that are the weight of ``module``; one where it is plain, none where it is absent."""
        if self._scheme is not None:
            return self._scheme.tensor_names(self.checkpoint, module)
        name = module + ".weight"
        return (name,) if name in self.checkpoint.tensors else ()

    def _packed(self, module: str, parts: Sequence[str], rows: int, cols: int, index: int | None = None) -> Matrix:
        assert self._scheme is not None
        matrix = self._scheme.matrix(self.checkpoint, module, index)
        if (matrix.rows, matrix.cols) != (rows, cols):
            raise self._misshapen(parts[0], (matrix.rows, matrix.cols), (rows, cols))
        self._used.update(parts)
        return matrix

    def _plain(self, info: TensorInfo) -> Matrix:
        if self.checkpoint.format != "gguf" and info.encoding not in _PLAIN:
            raise UnsupportedError(
                f"{self.checkpoint.root}: tensor {info.name!r} is stored as {info.encoding}, which is not implemented "
                f"for it; only {', '.join(_PLAIN)} are. Quantised weights need their scales and a quantization_config."
            )
        return TensorMatrix(info)

    def _is_zero_bias(self, name: str) -> bool:
        """Writers of quantised checkpoints store biases, all zero, for projections that have none."""
        info = self.checkpoint.tensors[name]
        if self._scheme is None or not name.endswith(".bias") or info.encoding not in _PLAIN or len(info.shape) != 1:
            return False
        return not read_dense(self.checkpoint, TensorMatrix(info)).any()

    def _missing(self, names: Sequence[str]) -> CheckpointError:
        other = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        return CheckpointError(
            f"{self.checkpoint.root}: tensor {names[0]!r}{other} is missing. The checkpoint is incomplete; "
            "download it again."
        )

    def _misshapen(self, name: str, found: Sequence[int], wanted: Sequence[int]) -> CheckpointError:
        return CheckpointError(
            f"{self.checkpoint.root}: tensor {name!r} has shape {list(found)}, but the model's configuration calls "
            f"for {list(wanted)}."
        )
