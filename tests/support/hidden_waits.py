"""Finding operations that would make the host wait for a card: those whose result the host needs to go on.

On the CPU nothing of the kind shows. So tensors that come from device memory are marked, and with them whatever is
computed from them; an operation that reads a value of a marked tensor (``item``, a comparison of whole tensors), or
whose result's size depends on values, is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READING = {
    "aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten.masked_select", "aten._unique2",
    "aten.bincount", "aten.repeat_interleave", "aten.unique_consecutive",
}  # fmt: skip


class HiddenWaits(TorchDispatchMode):
    """``memory``: where the device's tensors lie. ``found``: names of operations that would have waited."""

    def __init__(self, memory: Callable[[], Iterable[torch.Tensor]]) -> None:
        super().__init__()
        self._memory = memory
        self._marked: dict[int, torch.Tensor] = {}  # storages; kept, so that no other takes an address over
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(self._on_device(tensor) for tensor in inputs):
            return result
        self.seen += 1
        name = str(func.overloadpacket)
        by_mask = name in ("aten.index", "aten.index_put_") and any(t.dtype == torch.bool for t in inputs)
        if name in READING or by_mask:
            self.found.append(name)
        if name != "aten.copy_":  # what a copy brings to the host is the host's
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._marked[tensor.untyped_storage().data_ptr()] = tensor
        return result

    def _on_device(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return address in self._marked or any(
            memory.untyped_storage().data_ptr() == address for memory in self._memory()
        )
