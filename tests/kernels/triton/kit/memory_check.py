"""A memory and race checker for interpreted kernels, for tests only.

A launch may touch the elements of the tensors it was given and no others. Programs of a launch run
in no order, so an element that one program writes may be neither read nor written by another. Lanes
of a masked load without `other` hold anything on a GPU: here they hold NaN or a huge integer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter as interp

NOBODY, SEVERAL = 0, -1
_DENSE_BYTES = 1 << 26  # memory up to this span is looked up in a table, beyond it by search


class MemoryFault(Exception):
    """An access that is wrong, or only right by the order in which programs happened to run."""


def _element_addresses(x: Tensor) -> np.ndarray:
    """Byte addresses of a view's elements, each once."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if stride:
            steps = np.arange(size, dtype=np.int64) * stride
            offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
        elif size == 0:
            offsets = offsets[:0]
    return np.unique(x.data_ptr() + offsets * x.element_size())


class _Region:
    """The elements that a launch may touch within one storage, and who touched them last."""

    def __init__(self, views: list[Tensor]) -> None:
        self.unit = min(x.element_size() for x in views)
        self.addresses = np.unique(np.concatenate([_element_addresses(x) for x in views]))
        self.first = int(self.addresses[0])
        self.last = int(self.addresses[-1])
        span = self.last - self.first
        self.index: np.ndarray | None = None
        if span <= _DENSE_BYTES:
            self.index = np.full(span // self.unit + 1, -1, dtype=np.int32)
            self.index[(self.addresses - self.first) // self.unit] = np.arange(len(self.addresses))
        self.writer = np.zeros(len(self.addresses), dtype=np.int32)
        self.reader = np.zeros(len(self.addresses), dtype=np.int32)

    def locate(self, addresses: np.ndarray) -> np.ndarray:
        """Positions of addresses among the elements; -1 for what is none."""
        inside = (addresses >= self.first) & (addresses <= self.last)
        kept = np.where(inside, addresses, self.first)
        if self.index is not None:
            delta = kept - self.first
            found = self.index[delta // self.unit]
            inside &= delta % self.unit == 0
        else:
            found = np.searchsorted(self.addresses, kept)
            inside &= self.addresses[found] == kept
        return np.where(inside, found, -1)


class Launch:
    """What one launch of a kernel may touch and has touched."""

    def __init__(self, tensors: list[Tensor]) -> None:
        by_storage: dict[int, list[Tensor]] = {}
        for x in tensors:
            if x.numel():
                by_storage.setdefault(x.untyped_storage().data_ptr(), []).append(x)
        self.regions = [_Region(views) for views in by_storage.values()]
        self.program = 0
        self.place = (0, 0, 0)

    def enter(self, program: int, place: tuple[int, int, int]) -> None:
        self.program, self.place = program + 1, place

    def _find(self, what: str, pointers: np.ndarray) -> tuple[_Region, np.ndarray]:
        addresses = pointers.astype(np.int64)
        for region in self.regions:
            if region.first <= addresses[0] <= region.last:
                found = region.locate(addresses)
                if (found < 0).any():
                    self._out_of_bounds(what, addresses, int((found < 0).sum()))
                return region, found
        return self._out_of_bounds(what, addresses, len(addresses))

    def _out_of_bounds(self, what: str, addresses: np.ndarray, count: int) -> Any:
        raise MemoryFault(
            f"out of bounds: {what} of {count} of {len(addresses)} lanes in program {self.place} "
            "is outside every argument"
        )

    def load(self, pointers: np.ndarray) -> None:
        region, at = self._find("load", pointers)
        writer = region.writer[at]
        if ((writer != NOBODY) & (writer != self.program)).any():
            raise MemoryFault(
                f"program {self.place} reads what another program of the launch wrote"
            )
        reader = region.reader[at]
        mine = (reader == NOBODY) | (reader == self.program)
        region.reader[at] = np.where(mine, self.program, SEVERAL)

    def store(self, pointers: np.ndarray, values: np.ndarray) -> None:
        region, at = self._find("store", pointers)
        lanes = np.arange(len(at), dtype=np.int32)
        last = np.empty(len(region.writer), dtype=np.int32)
        last[at] = lanes
        twice = last[at] != lanes
        if twice.any() and (values[last[at]] != values)[twice].any():
            raise MemoryFault(f"one store of program {self.place} writes an element twice")
        writer, reader = region.writer[at], region.reader[at]
        if ((writer != NOBODY) & (writer != self.program)).any():
            raise MemoryFault(f"program {self.place} writes what another program wrote")
        if ((reader != NOBODY) & (reader != self.program)).any():
            raise MemoryFault(f"program {self.place} writes what another program read")
        region.writer[at] = self.program


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, interp.TensorDescriptor):
            # a descriptor describes a whole view; what it may touch is that view
            yield argument.base.as_strided(tuple(argument.shape), tuple(argument.strides))
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


class Checker:
    """Hooks into the interpreter; each launch is checked from when `install` was called."""

    def __init__(self) -> None:
        self.launch: Launch | None = None
        self.launches = 0

    def install(self) -> None:
        self._hook_launches()
        self._hook_loads()
        self._hook_stores()

    def _hook_launches(self) -> None:
        run, place = interp.GridExecutor.__call__, interp.InterpreterBuilder.set_grid_idx
        checker = self

        def call(executor: Any, *arguments: Any, **options: Any) -> None:
            checker.launch = Launch([*_tensors(arguments), *_tensors(options.values())])
            checker.launches += 1
            try:
                run(executor, *arguments, **options)
            finally:
                checker.launch = None

        def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
            place(self, x, y, z)
            _, ny, nz = self.grid_dim
            x, y, z = self.grid_idx
            if checker.launch is not None:
                checker.launch.enter((x * ny + y) * nz + z, (x, y, z))

        interp.GridExecutor.__call__ = call
        interp.InterpreterBuilder.set_grid_idx = set_grid_idx

    def _hook_loads(self) -> None:
        load = interp.InterpreterBuilder.create_masked_load
        checker = self

        def masked_load(
            self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **kw: Any
        ) -> Any:
            data, keep = np.broadcast_arrays(pointers.data, mask.data)
            touched = data[keep]
            if checker.launch is not None and touched.size:
                checker.launch.load(touched)
            result = load(self, pointers, mask, other, *rest, **kw)
            # a scalar `other` of 0 arrives as None, so scalars are left to the source lint
            if other is None and keep.size > 1 and not keep.all():
                result.data = np.where(keep, result.data, _undefined(result))
            return result

        interp.InterpreterBuilder.create_masked_load = masked_load

    def _hook_stores(self) -> None:
        store = interp.InterpreterBuilder.create_masked_store
        checker = self

        def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            data, keep, values = np.broadcast_arrays(pointers.data, mask.data, value.data)
            touched = data[keep]
            if checker.launch is not None and touched.size:
                checker.launch.store(touched, values[keep])
            return store(self, pointers, value, mask, *rest)

        interp.InterpreterBuilder.create_masked_store = masked_store


def _undefined(handle: Any) -> Any:
    dtype = handle.data.dtype
    if dtype.kind == "f":
        return dtype.type(np.nan)
    if handle.dtype.scalar == interp.tl.bfloat16:
        return np.uint16(0x7FC0)
    return dtype.type(1) if dtype.kind == "b" else np.iinfo(dtype).max


def poisoned(*shape: int, dtype: torch.dtype, guard_rows: int = 2) -> tuple[Tensor, Tensor]:
    """(whole, view): a NaN-filled tensor and the view of it between its guard rows."""
    whole = torch.full((shape[0] + 2 * guard_rows, *shape[1:]), torch.nan, dtype=dtype)
    return whole, whole[guard_rows : guard_rows + shape[0]]
