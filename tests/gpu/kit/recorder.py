"""Writes down what the host asks of the device: operators, kernels, operations between ranks.

The recorder sees every operator through torch's dispatch, after autograd, in every thread that runs
for the step. It keeps the operations in flight with the bytes that they read and write, and notes a
fault when something else touches those bytes before the wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import ROOT
from tests.gpu.kit.trace import Event, Kind, Trace

# Operators that allocate and compute nothing.
_ALLOCATIONS = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("_unsafe_view", "_reshape_alias", "lift_fresh"),
    )
)
# Operators whose result's shape depends on values, so that the host waits for the device.
_DATA_DEPENDENT = frozenset(
    (
        *("nonzero", "masked_select", "equal", "is_nonzero", "bincount", "repeat_interleave"),
        *("_unique2", "unique_dim", "unique_consecutive"),
    )
)
_PRODUCTS = frozenset(
    ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "addmv", "mv", "dot")
)


class Range(NamedTuple):
    """Bytes first ... last - 1 of a storage, by the number of the storage."""

    storage: int
    first: int
    last: int

    def overlaps(self, other: Range) -> bool:
        return self.storage == other.storage and self.first < other.last and other.first < self.last


def range_of(x: Tensor) -> Range:
    """The bytes between the first and the last element of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin = int(x.storage_offset()) * x.element_size()
    length = 0 if x.numel() == 0 else int(last + 1) * x.element_size()
    return Range(x.untyped_storage()._cdata, begin, begin + length)


class InFlight:
    """Work that the compute stream has not waited for: an operation between ranks, or a launch on
    another stream. The former is the work object that torch's process groups return.

    It keeps its tensors alive, as NCCL's works do, so that no other tensor gets their memory.
    """

    def __init__(
        self, recorder: Recorder, event: Event, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        self.event, self.tensors = event, (*reads, *writes)
        self.reads, self.writes = [range_of(x) for x in reads], [range_of(x) for x in writes]
        self._recorder = recorder

    def wait(self, timeout: object = None) -> bool:
        """Let the compute stream wait; the host goes on."""
        self._recorder.waited(self)
        return True

    def is_completed(self) -> bool:
        """False until it was waited for: nothing is known before."""
        return self not in self._recorder.in_flight

    def get_future_result(self) -> InFlight:
        """The future of NCCL's watchdog, which is done when the work is."""
        return self

    done = is_completed


class Recorder:
    """The trace of one rank, and what it has in flight. `streams`: those that are current, by
    nested blocks; none but the compute stream if it is empty.
    """

    def __init__(self, rank: int) -> None:
        self.trace = Trace(rank)
        self.in_flight: list[InFlight] = []
        self.streams: list[object] = []
        self.num_ops = 0
        self._on_streams: list[tuple[object, InFlight]] = []

    def add(self, kind: Kind, name: str, **values: Any) -> Event:
        """Write an event down, with the place in the product that it comes from."""
        event = Event(kind, name, **{"site": site(), **values})
        self.trace.events.append(event)
        return event

    def fault(self, text: str) -> None:
        self.trace.faults.append(f"{text}, at {site()}")

    def sync(self, name: str) -> None:
        """The host waits for everything that the compute stream was given."""
        self.add("sync", name)

    def launch(
        self, name: str, comm: str, detail: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> InFlight:
        """Start an operation between ranks, which other operations in flight must allow."""
        for x in (*reads, *writes):
            if x.device.type != "cuda":
                self.fault(f"{name} of a tensor on {x.device}")
        self.touch(name, reads, writes)
        event = self.add("collective", name, op=self.num_ops, comm=comm, detail=detail)
        self.num_ops += 1
        work = InFlight(self, event, reads, writes)
        self.in_flight.append(work)
        return work

    def waited(self, work: InFlight) -> None:
        if work in self.in_flight:
            self.in_flight.remove(work)
        self.add("wait", work.event.name, op=work.event.op, comm=work.event.comm)

    def launched(
        self, kind: Kind, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        """Write down a kernel or a copy; on another stream it is in flight until a wait for that.

        writes: with the result.
        """
        self.touch(name, reads, writes)
        event = self.add(kind, name)
        if self.streams:
            work = InFlight(self, event, reads, writes)
            self.in_flight.append(work)
            self._on_streams.append((self.streams[-1], work))

    def join(self, stream: object) -> None:
        """The compute stream waits for another."""
        done = [work for other, work in self._on_streams if other is stream]
        self._on_streams = [pair for pair in self._on_streams if pair[0] is not stream]
        self.in_flight = [work for work in self.in_flight if work not in done]

    def touch(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Note a fault if an operation in flight writes what is read, or uses what is written."""
        if not self.in_flight:
            return
        read, written = [range_of(x) for x in reads], [range_of(x) for x in writes]
        for work in self.in_flight:
            late = any(r.overlaps(w) for r in [*read, *written] for w in work.writes)
            early = any(w.overlaps(r) for w in written for r in work.reads)
            if late or early:
                does = "uses the result of" if late else "overwrites the input of"
                op = f"{work.event.name} #{work.event.op} launched at {work.event.site}"
                self.fault(f"{name} {does} {op} before the wait for it")


class Operators(TorchDispatchMode):
    """Hands the recorder every operator of the threads that run for the step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query, such as that of a device
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            return self._scalar(args[0])
        reads, writes = _operands(func._schema, args, kwargs)
        if name == "_to_copy" and _crosses(args[0].device, kwargs.get("device")):
            dtype = kwargs.get("dtype") or args[0].dtype
            copy = torch.empty(args[0].shape, dtype=dtype, device=kwargs["device"])
            self._copy(args[0], copy, bool(kwargs.get("non_blocking")))
            return copy
        if name == "copy_" and _crosses(args[1].device, args[0].device):
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            self._copy(args[1], args[0], bool(non_blocking))
            return args[0]

        result = func(*args, **kwargs)
        on_device = any(_on_cuda(x) for x in (*reads, *writes, *_tensors(result)))
        if on_device and not _is_view(func._schema) and name not in _ALLOCATIONS:
            self.recorder.launched("kernel", name, reads, [*writes, *_tensors(result)])
            if name in _DATA_DEPENDENT:
                self.recorder.sync(name)
            if name in _PRODUCTS:
                types_of = (_short(x.dtype) for x in _tensors(args))
                made = ", ".join(_short(x.dtype) for x in _tensors(result))
                self.recorder.trace.products[f"{name}: {', '.join(types_of)} -> {made}"] += 1
        return result

    def _scalar(self, x: Tensor) -> float | int | bool:
        """A value for the host: 0 of any type, since nothing has values here."""
        if x.device.type == "cuda":
            self.recorder.sync("item")
        return False if x.dtype == torch.bool else 0.0 if x.dtype.is_floating_point else 0

    def _copy(self, source: Tensor, to: Tensor, non_blocking: bool) -> None:
        """A copy between host and device; only pinned memory is copied while the host goes on."""
        if to.device.type == "cpu":
            self.recorder.touch("a copy", [source], [to])
            self.recorder.sync("copy to the host")
            return
        pinned = getattr(source, "is_staged", False)
        how = "async, pageable" if non_blocking and not pinned else "blocking"
        how = "async" if non_blocking and pinned else how
        self.recorder.launched("copy", how, [], [to])


def site() -> str:
    """The function of the product that asks: "train/loop.py Trainer._agree".

    It is the innermost on the stack, but for files that only pass on what others ask for.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PRODUCT):
            file = path.removeprefix(_PRODUCT)
            if file not in _PLUMBING:
                return f"{file} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""


_PRODUCT = f"{ROOT}/megalite/"
_PLUMBING = (
    *("distributed/comm.py", "distributed/ledger.py", "distributed/clock.py"),
    "kernels/upload.py",
)


def _operands(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes, by its schema."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for number, argument in enumerate(schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(_tensors(given))
    return reads, writes


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _crosses(source: torch.device, to: Any) -> bool:
    """True for a copy between the host and the device."""
    return to is not None and torch.device(to).type != source.type


def _on_cuda(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _is_view(schema: Any) -> bool:
    """True for an operator that returns its argument's memory and writes nothing."""
    infos = [result.alias_info for result in schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
