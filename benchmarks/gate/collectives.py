"""The third part of gpu_gate: NCCL with one rank, through the product's own collectives.

A process group of one, groups split from it as the mesh does, and on each every operation of
comm.py that an axis has; messages between stages need a second rank. comm.py itself moves nothing
on an axis of size 1, so the axis here has a size of one that is not recognised. A dry run takes
gloo's own operations, not those that comm.py has in place of them. What one rank gets back is what
it sent, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gate.device import Gate, describe, same_bits
from megalite.distributed import comm
from megalite.distributed.mesh import Axis, Mesh
from megalite.layout.topology import Topology
from megalite.process.env import end_process, init_process
from megalite.process.launcher import Launch

_TIMEOUT_S = 60.0
_ROWS = 12


class _One(int):
    """One, unequal to everything, so that nothing is skipped for it."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class LoneAxis(Axis):
    """An axis of one rank whose collectives run on a group, each by the operation of its name."""

    def __init__(self, mesh: Mesh, group: Any) -> None:
        super().__init__(mesh, "world")
        self.size, self.backend = _One(1), "nccl" if _is_nccl() else "one rank"
        self._own = group

    @property
    def group(self) -> Any:
        return self._own


# Of comm.py: each gets a tensor of [_ROWS, 5], and what it gives must have the same bits.
OPERATIONS: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "all_reduce": lambda x, axis: comm.all_reduce(x, axis),
    "all_reduce max": lambda x, axis: comm.all_reduce(x, axis, "max"),
    "start_all_reduce": lambda x, axis: comm.start_all_reduce(x.t(), axis).wait().t(),
    "all_gather": comm.all_gather,
    "start_all_gather": lambda x, axis: comm.start_all_gather(x, axis).wait(),
    "start_all_gather_into": lambda x, axis: comm.start_all_gather_into(x, axis).wait(),
    "reduce_scatter": comm.reduce_scatter,
    "start_reduce_scatter": lambda x, axis: comm.start_reduce_scatter(x, axis).wait(),
    "start_reduce_scatter_into": lambda x, axis: comm.start_reduce_scatter_into(x, axis).wait(),
    "all_to_all": lambda x, axis: comm.all_to_all(
        x.flatten(), axis, [x.numel()], [x.numel()]
    ).view_as(x),
    "broadcast": comm.broadcast,
}
# Of anything that JSON can hold.
OBJECTS: dict[str, Callable[[Any, Axis], Any]] = {
    "broadcast_object": comm.broadcast_object,
    "all_gather_object": lambda value, axis: comm.all_gather_object(value, axis)[0],
    "gather_object": lambda value, axis: comm.gather_object(value, axis)[0],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def collectives(gate: Gate) -> None:
    """A row a group: the world's, one split from it, and an urgent one as tp has."""
    init_process(Launch(), gate.device, _TIMEOUT_S)
    try:
        mesh = Mesh(Topology(), gate.device, timeout_s=_TIMEOUT_S)
        version = ".".join(map(str, torch.cuda.nccl.version())) if _is_nccl() else None
        groups: dict[str, Callable[[], Any]] = {
            "world": lambda: dist.group.WORLD,
            "split": lambda: split(None),
            "urgent split": lambda: split(urgent()),
        }
        for name, make in groups.items():
            row = {"kernel": f"{dist.get_backend()} {name}", "nccl": version}
            with gate.guarded({**row, "correct": False}):
                faults = run(gate, LoneAxis(mesh, make()))
                gate.emit({**row, "correct": not faults, "faults": faults})
    finally:
        end_process()


def _is_nccl() -> bool:
    return dist.get_backend() == "nccl"


def split(options: Any) -> Any:
    """A group of this rank alone, by the call that the mesh makes on this backend."""
    timeout = timedelta(seconds=_TIMEOUT_S)
    if _is_nccl():
        return dist.split_group(split_ranks=[[0]], timeout=timeout, pg_options=options)
    return dist.new_group([0], timeout=timeout, use_local_synchronization=True)


def urgent() -> Any:
    """The options of a group whose stream has a high priority; none on gloo."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if _is_nccl() else None


def run(gate: Gate, axis: Axis) -> list[str]:
    """What every operation got wrong, in every type."""
    faults = []
    for dtype in DTYPES:
        x = (100 * gate.draw(_ROWS, 5, seed=1)).to(dtype)
        for name, operation in OPERATIONS.items():
            try:
                got = operation(x.clone(), axis)
                if got.shape != x.shape or not same_bits(got, x):
                    faults.append(f"{name} of {dtype}: other values")
            except Exception as error:
                faults.append(f"{name} of {dtype}: {describe(error)}")
    value = {"text": "a", "numbers": [1, 2.5, None]}
    for name, operation in OBJECTS.items():
        try:
            if operation(value, axis) != value:
                faults.append(f"{name}: other values")
        except Exception as error:
            faults.append(f"{name}: {describe(error)}")
    comm.barrier(axis)
    gate.synchronize()
    return faults
