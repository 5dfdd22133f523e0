"""How much memory tensors take while code runs: counted, so that it is the same on each run."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationMeter(TorchDispatchMode):
    """Bytes of the storages made inside it: alive now, at most, and in its largest one.

    `peak_bytes` leaves out what an operation takes and gives back within itself.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and asking dynamo to skip imports 900 modules

    def __init__(self) -> None:
        super().__init__()
        self.alive_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0
        self.largest_elements = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._know(leaf.untyped_storage(), 0)  # was there before, or is counted
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return out

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        self._know(storage, size)
        self.alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        self.largest_bytes = max(self.largest_bytes, size)
        self.largest_elements = max(self.largest_elements, size // x.element_size())

    def _know(self, storage: UntypedStorage, counted: int) -> None:
        """Until it dies: another may then stand at its address, and is to be counted."""
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            weakref.finalize(storage, self._forget, storage._cdata, counted)

    def _forget(self, key: int, size: int) -> None:
        self.alive_bytes -= size
        self._known.discard(key)
