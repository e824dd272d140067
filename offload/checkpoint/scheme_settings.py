"""Reading quantisation settings strictly, and finding a module's tensors by their suffixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.kernels.dequant.plain import PLAIN_DTYPES
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.stored import TensorMatrix, tensor_slice
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, TensorInfo


def only(method: str, config: Mapping[str, Any], key: str, allowed: Sequence[Any], default: Any) -> Any:
    """``config[key]`` (or ``default``), refused by name unless it is one of ``allowed``."""
    value = config.get(key, default)
    if not any(value == item and type(value) is type(item) for item in allowed):
        options = " or ".join(repr(item) for item in allowed)
        raise UnsupportedError(f"{method} quantisation with {key} = {value!r} is not implemented; only {options} is")
    return value


def unset(method: str, config: Mapping[str, Any], *keys: str) -> None:
    """Refuse options that change the layout in ways that are not implemented."""
    for key in keys:
        if config.get(key):
            raise UnsupportedError(f"{method} quantisation with {key} = {str(config[key])[:100]} is not implemented")


def group_size(method: str, value: Any) -> int | None:
    """A stated group size: None for -1 (one group a row)."""
    if type(value) is not int or (value < 1 and value != -1):
        raise CheckpointError(f"{method} quantisation: group_size is {value!r}, not a positive number or -1")
    return None if value == -1 else value


class SuffixScheme:
    """A scheme whose modules are stored as ``module + suffix`` tensors.

    ``layouts``: alternatives, each the suffixes that must all be there, the codes first; ``optional``: suffixes that
    may accompany any of them. A module without any of these but with a plain ``.weight`` (or, stacked, under its own
    name) is not quantised.
    """

    method: ClassVar[str]
    layouts: ClassVar[tuple[tuple[str, ...], ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    shares_weight_name: ClassVar[bool] = False
    """Whether the codes' own name is that of a plain weight, so that it alone may mean "not quantised"."""

    def tensor_names(self, checkpoint: Checkpoint, module: str) -> tuple[str, ...]:
        tensors = checkpoint.tensors
        for layout in self.layouts:
            found = [module + suffix for suffix in layout if module + suffix in tensors]
            if len(found) == len(layout):
                return (*found, *(module + suffix for suffix in self.optional if module + suffix in tensors))
            codes_only = self.shares_weight_name and found == [module + layout[0]]
            if found and not codes_only:
                missing = [module + suffix for suffix in layout if module + suffix not in tensors]
                raise CheckpointError(
                    f"{self.method} quantisation: {found[0]} is stored, but {', '.join(missing)} is missing"
                )
        stray = [module + suffix for suffix in self.optional if module + suffix in tensors]
        if stray:
            raise CheckpointError(f"{self.method} quantisation: {stray[0]} is stored without a weight")
        return next(((name,) for name in (f"{module}.weight", module) if name in tensors), ())

    def matrix(self, checkpoint: Checkpoint, module: str, index: int | None = None) -> Matrix:
        names = self.tensor_names(checkpoint, module)
        if not names:
            raise CheckpointError(f"module {module!r} has no weight in {checkpoint.root}")
        tensors = [checkpoint.tensors[name] for name in names]
        if index is not None:
            tensors = [tensor_slice(tensor, index) for tensor in tensors]
        if len(tensors) == 1:
            return self._unquantised(tensors[0])
        by_suffix = {name.removeprefix(module): tensor for name, tensor in zip(names, tensors, strict=True)}
        return self.build(checkpoint, by_suffix)

    def build(self, checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> Matrix:
        """The matrix made of ``tensors`` (suffix -> tensor) of one layout."""
        raise NotImplementedError

    def _unquantised(self, tensor: TensorInfo) -> Matrix:
        if tensor.encoding not in PLAIN_DTYPES or tensor.encoding.startswith("F8"):
            raise CheckpointError(
                f"tensor {tensor.name!r} is stored as {tensor.encoding}, but the scales that {self.method} "
                "quantisation keeps beside it are missing"
            )
        return TensorMatrix(tensor)
