"""Contenders in processes of their own, driven by calls, so that their steps can be interleaved.

A lane is a worker object in each of its ranks. `Lane.call` runs one method on all of them and
brings the results home; between calls the processes sleep. It knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.process.local import run_local

_TIMEOUT_S = 3600.0  # ranks of a lane wait in a collective for their next call
_CLOSE_S = 30.0


class Lane:
    """`make(mesh, *args)` on every rank of `topology`, one thread each; use as a context.

    `make` must be importable by name. Raises RuntimeError from `call` when the lane died.
    """

    def __init__(
        self, name: str, topology: Topology, make: Callable[..., Any], args: tuple[Any, ...] = ()
    ) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(
            target=_host, args=(theirs, topology, make, args), name=name
        )
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> list[Any]:
        """What `method(*args)` of the worker returned, by rank."""
        try:
            self._link.send((method, args))
            results: list[Any] = self._link.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(_CLOSE_S)
            raise RuntimeError(
                f"lane {self.name} ended in {method!r} with exit code {self._process.exitcode}; "
                "its own message is above"
            ) from None
        return results

    def close(self) -> None:
        """Let the worker's processes end; those that do not are killed."""
        with contextlib.suppress(BrokenPipeError):
            self._link.send(None)
        self._link.close()
        self._process.join(_CLOSE_S)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _host(
    link: Connection, topology: Topology, make: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """A lane's first process: the only rank, or the parent of all ranks."""
    if topology.world_size == 1:
        _rank(None, torch.device("cpu"), link, topology, make, args)
        return
    ranks_args = (link, topology, make, args)
    code = run_local(
        _rank,
        topology.world_size,
        ranks_args,
        device="cpu",
        timeout_s=_TIMEOUT_S,
        start_method="spawn",
    )
    sys.exit(code)


def _rank(
    launch: object,
    device: torch.device,
    link: Connection,
    topology: Topology,
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> int:
    torch.set_num_threads(1)
    mesh = Mesh(topology, device, timeout_s=_TIMEOUT_S)
    mesh.create()
    worker = make(mesh, *args)
    while (request := _next_request(link, mesh)) is not None:
        method, arguments = request
        results = _gather(getattr(worker, method)(*arguments), mesh)
        if mesh.rank == 0:
            link.send(results)
    return 0


def _next_request(link: Connection, mesh: Mesh) -> tuple[str, tuple[Any, ...]] | None:
    """The driver's next call, on all ranks; None when it wants no more or is gone."""
    box: list[Any] = [None]
    if mesh.rank == 0:
        with contextlib.suppress(EOFError):
            box[0] = link.recv()
    if mesh.world.size > 1:
        dist.broadcast_object_list(box)
    request: tuple[str, tuple[Any, ...]] | None = box[0]
    return request


def _gather(result: Any, mesh: Mesh) -> list[Any]:
    results: list[Any] = [result] * mesh.world.size
    if mesh.world.size > 1:
        dist.all_gather_object(results, result)
    return results
