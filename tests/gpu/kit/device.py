"""The pretended device: fake tensors on cuda:0, launches and process groups that only record.

`pretend` changes torch and triton for the whole process, so it belongs into one of its own, into
which `shim.load` came before torch. Everything that would reach CUDA is replaced below the product:
torch.cuda's queries, events and streams, Triton's launcher, torch's process groups.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.gpu.kit.recorder import InFlight, Recorder
from tests.gpu.kit.writes import written_parameters

DEVICE = torch.device("cuda", 0)


class Pretended:
    """The device of this process; `recorder` is that of the rank whose turn it is."""

    recorder: Recorder

    def __init__(self) -> None:
        self._names: dict[dist.ProcessGroup, str] = {}
        self._made: Counter[tuple[int, ...]] = Counter()

    def begin(self, rank: int) -> Recorder:
        """A new recorder, for a rank that starts now; communicators are numbered anew."""
        self.recorder = Recorder(rank)
        self._names, self._made = {}, Counter()
        return self.recorder

    def communicator(self, group: dist.ProcessGroup) -> str:
        """The name of a group, the same on all its members: its ranks, and which of those ranks'
        groups it is, by the order in which they were made.
        """
        if group not in self._names:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._names[group] = f"{','.join(map(str, ranks))} #{self._made[ranks]}"
            self._made[ranks] += 1
        return self._names[group]


def pretend() -> Pretended:
    """Make this process see a GPU, from now on."""
    device = Pretended()
    _replace_queries()
    _replace_streams(device)
    _replace_tensors(device)
    _replace_launches(device)
    _replace_groups(device)
    return device


def pretend_with_values() -> None:
    """Make this process see a GPU whose tensors are real ones in the host's memory."""
    device = Pretended()
    device.begin(0)
    _replace_queries()
    _replace_streams(device)
    _replace_pinning()


# --- torch.cuda ----------------------------------------------------------------------------------


def _replace_queries() -> None:
    """Eight H100s of 80 GiB on this host."""
    name, memory = "NVIDIA H100 80GB HBM3", 80 << 30
    properties = SimpleNamespace(
        multi_processor_count=132, total_memory=memory, name=name, major=9, minor=0
    )
    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 8,
        "current_device": 0,
        "set_device": None,
        "get_device_properties": properties,
        "get_device_name": name,
        "get_device_capability": (9, 0),
        "max_memory_allocated": 0,
        "memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (memory, memory),
        "reset_peak_memory_stats": None,
    }
    for query, value in values.items():
        setattr(torch.cuda, query, lambda *_, _value=value, **__: _value)


def _replace_streams(device: Pretended) -> None:
    class Event:
        """A torch.cuda.Event; any two are a millisecond apart."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def record(self, *_: object) -> None:
            device.recorder.add("mark", "record")

        def synchronize(self) -> None:
            device.recorder.sync("event")

        def query(self) -> bool:
            return True

        def wait(self, *_: object) -> None:
            pass

        def elapsed_time(self, _: object) -> float:
            return 1.0

    class Stream:
        """A torch.cuda.Stream: the compute stream waits for what was launched on others."""

        def __init__(self, *_: object, **__: object) -> None:
            self.device, self.cuda_stream, self.device_index = DEVICE, 0, 0

        def synchronize(self) -> None:
            device.recorder.sync("stream")
            device.recorder.join(self)

        def wait_stream(self, other: object) -> None:
            if not device.recorder.streams:
                device.recorder.join(other)

    @contextlib.contextmanager
    def stream(entered: object) -> Iterator[None]:
        device.recorder.streams.append(entered)
        yield
        device.recorder.streams.pop()

    only = Stream()
    changes: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "current_stream": lambda *_: [only, *device.recorder.streams][-1],
        "synchronize": lambda *_: device.recorder.sync("device"),
        "empty_cache": lambda: device.recorder.sync("empty_cache"),
    }
    for name, value in changes.items():
        setattr(torch.cuda, name, value)


# --- tensors -------------------------------------------------------------------------------------


def _replace_tensors(pretended: Pretended) -> None:
    """What torch does to fake or pinned tensors below its dispatch, where CUDA would be needed."""
    make_tensor = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = make_tensor(data, *args, **kwargs)
        if device is None or torch.device(device).type == "cpu":
            return made
        pretended.recorder.add("copy", "blocking")
        return torch.zeros(made.shape, dtype=made.dtype, device=device)

    def tolist(self: Tensor) -> Any:
        if self.device.type == "cuda":
            pretended.recorder.sync("tolist")
        values: Any = 0.0 if self.dtype.is_floating_point else 0
        for size in reversed(self.shape):
            values = [values] * size
        return values

    torch.tensor = tensor
    fake: Any = FakeTensor
    fake.tolist = tolist
    # Allocations begin at multiples of 256 bytes on CUDA.
    fake.data_ptr = lambda self: 256 + self.storage_offset() * self.element_size()
    _replace_pinning()


def _replace_pinning() -> None:
    """Pinned memory is a copy that is known to be one; streams need no care."""

    def pin_memory(self: Tensor, *_: object) -> Tensor:
        staged = self.clone()
        staged.is_staged = True  # type: ignore[attr-defined]
        return staged

    plain: Any = Tensor
    plain.pin_memory = pin_memory
    plain.is_pinned = lambda self, *_: getattr(self, "is_staged", False)
    plain.record_stream = lambda self, _: None


# --- Triton --------------------------------------------------------------------------------------


def _replace_launches(device: Pretended) -> None:
    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        name = self.fn.__name__
        recorder = device.recorder
        written = written_parameters(self.fn)
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for parameter, value in [*zip(self.arg_names, args, strict=False), *kwargs.items()]:
            x = value.base if isinstance(value, TensorDescriptor) else value
            if not isinstance(x, Tensor):
                continue
            (writes if parameter in written else reads).append(x)
            if x.device != DEVICE:
                recorder.fault(f"{name} was given {parameter} on {x.device}")
        recorder.launched("kernel", name, reads, writes)

    launcher: Any = JITFunction
    launcher.run = run


# --- process groups ------------------------------------------------------------------------------


def _replace_groups(device: Pretended) -> None:
    """Operations on groups, by the names that torch's functions call them by, old and new."""

    def inplace(name: str) -> Any:
        def start(self: Any, tensors: list[Tensor], *options: Any) -> InFlight:
            return _start(device, self, name, tensors, tensors, options)

        return start

    def single(name: str) -> Any:
        def start(self: Any, out: Tensor, x: Tensor, *options: Any) -> InFlight:
            return _start(device, self, name, [x], [out], options)

        return start

    def gather(self: Any, outs: list[list[Tensor]], xs: list[Tensor], *options: Any) -> InFlight:
        return _start(device, self, "gather", xs, [x for out in outs for x in out], options)

    def send(self: Any, tensors: list[Tensor], *_: Any) -> InFlight:
        return _start(device, self, "send", tensors, [], ())

    def recv(self: Any, tensors: list[Tensor], *_: Any) -> InFlight:
        return _start(device, self, "recv", [], tensors, ())

    methods = {
        "allreduce": inplace("all_reduce"),
        "broadcast": inplace("broadcast"),
        "all_gather_single": single("all_gather"),
        "_allgather_base": single("all_gather"),
        "reduce_scatter_single": single("reduce_scatter"),
        "_reduce_scatter_base": single("reduce_scatter"),
        "all_to_all_single": single("all_to_all"),
        "alltoall_base": single("all_to_all"),
        "gather": gather,
        "send": send,
        "recv": recv,
    }
    for name, start in methods.items():
        setattr(dist.ProcessGroup, name, start)

    # The mesh takes the branch of NCCL, whose splits of the world are recorded.
    def split_group(split_ranks: list[list[int]], **options: Any) -> dist.ProcessGroup | None:
        device.recorder.add("split", str(split_ranks))
        mine = next((ranks for ranks in split_ranks if dist.get_rank() in ranks), None)
        if mine is None:
            return None
        made = dist.new_group(mine, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        device.communicator(made)  # numbered in the order of making
        return made

    changed: Any = dist
    changed.get_backend = lambda *_: "nccl"
    changed.split_group = split_group
    changed.ProcessGroupNCCL = SimpleNamespace(Options=SimpleNamespace)


def _start(
    device: Pretended,
    group: Any,
    name: str,
    reads: list[Tensor],
    writes: list[Tensor],
    options: tuple[Any, ...],
) -> InFlight:
    """Record an operation; members must agree in its detail: type, bytes, kind of reduction."""
    x = (reads or writes)[0]
    num_bytes = sum(x.numel() * x.element_size() for x in (reads or writes))
    reduction = next((str(o.reduceOp.op) for o in options if hasattr(o, "reduceOp")), "")
    detail = f"{x.dtype} {num_bytes} {reduction}".strip()
    return device.recorder.launch(name, device.communicator(group), detail, reads, writes)
