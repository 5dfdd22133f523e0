"""Rates of the communication that training uses: collectives, and messages between neighbours.

    torchrun --standalone --nproc-per-node=8 benchmarks/bandwidth.py    one process a GPU

Each operation runs at each size, and the slowest rank counts. The bus rate is that of what a rank
sends in a ring: of S bytes in all, 2 (n - 1) / n x S in an all-reduce, half of it in an all-gather
or a reduce-scatter, and S in a message. Messages go from each even rank to the next, all at once.
Rank 0 prints a table, and adds JSON lines to the file of --output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.errors import EXIT_USER, ConfigError
from megalite.layout.topology import Topology
from megalite.process.env import pick_device
from megalite.process.launcher import Launch, read_launch
from megalite.train.rank import run_rank_and_exit

_TIMEOUT_S = 120.0
_WARMUP = 3
Call = Callable[[], object]


def main(arguments: Sequence[str]) -> int:
    """Measure, as one of the ranks that torchrun started; returns the exit code."""
    options = parse(arguments)
    launch = read_launch()
    if launch.world_size < 2:
        print("error: one process; start two or more with torchrun", file=sys.stderr)
        return EXIT_USER
    run_rank_and_exit(measure, launch, pick_device(launch), (options,), _TIMEOUT_S)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", default="1,16,256,1024", help="sizes in MiB (default 1,16,256,1024)"
    )
    parser.add_argument("--repeats", type=int, default=20, help="calls a size (default 20)")
    parser.add_argument("--output", type=Path, help="file that JSON lines are added to")
    options = parser.parse_args(arguments)
    options.mib = [float(size) for size in options.mib.split(",")]
    if options.repeats < 1 or min(options.mib) <= 0:
        parser.error("--repeats must be at least 1 and every size above 0")
    return options


def measure(launch: Launch, device: torch.device, options: argparse.Namespace) -> int:
    """One rank's part of all measurements; rank 0 prints and writes them."""
    mesh = Mesh(Topology(pp=launch.world_size), device, timeout_s=_TIMEOUT_S)
    mesh.create("world", "channels")
    rows = []
    for mib in options.mib:
        for name, sent, call in operations(mesh, int(mib * 2**20)):
            seconds = slowest_s(mesh, call, options.repeats)
            rows.append(
                {
                    "benchmark": "bandwidth",
                    "operation": name,
                    "mib": mib,
                    "world_size": launch.world_size,
                    "backend": mesh.backend,
                    "ms": seconds * 1e3,
                    "bus_gb_per_s": sent / seconds / 1e9,
                }
            )
    if launch.rank == 0:
        print(table(rows))
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def operations(mesh: Mesh, num_bytes: int) -> Iterator[tuple[str, float, Call]]:
    """(name, bytes that a rank sends in a ring, call) of every operation on so many bytes."""
    size, rank = mesh.world.size, mesh.rank
    count = max(1, num_bytes // 2 // size) * size
    whole = torch.zeros(count, dtype=torch.bfloat16, device=mesh.device)
    ring = 2.0 * count * (size - 1) / size
    yield "all_reduce", 2 * ring, lambda: comm.all_reduce(whole, mesh.world)
    yield "all_gather", ring, lambda: comm.start_all_gather_into(whole, mesh.world).wait()
    yield "reduce_scatter", ring, lambda: comm.start_reduce_scatter_into(whole, mesh.world).wait()

    # The last of an odd number of ranks has no partner.
    source = rank - rank % 2
    if source + 1 >= size:
        yield "send_recv", 2.0 * count, lambda: None
    elif rank == source:
        yield "send_recv", 2.0 * count, lambda: comm.isend(whole, mesh, rank, rank + 1).wait()
    else:
        yield "send_recv", 2.0 * count, lambda: comm.irecv(whole, mesh, source, rank).wait()


def slowest_s(mesh: Mesh, call: Call, repeats: int) -> float:
    """Mean seconds of a call on the rank where it is longest."""
    for _ in range(_WARMUP):
        call()
    synchronize(mesh)
    comm.barrier(mesh.world)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(mesh)
    mine = torch.tensor((time.perf_counter() - began) / repeats, device=mesh.device)
    return float(comm.all_reduce(mine, mesh.world, op="max"))


def synchronize(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown."""
    lines = ["| operation | MiB | ms | bus GB/s |", "| --- | --: | --: | --: |"]
    for row in rows:
        figures = f"{row['mib']:g} | {row['ms']:.3f} | {row['bus_gb_per_s']:.4g}"
        lines.append(f"| {row['operation']} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)
