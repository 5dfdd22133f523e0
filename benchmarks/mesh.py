"""How long one rank of a large world takes to make its mesh, on the fake backend.

Prints one JSON line. Knows nothing of the network: on a cluster the communicators' own start-up
comes on top.

    python benchmarks/mesh.py --tp 8 --pp 16 --dp 128
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.process.env import end_process, init_process
from megalite.process.launcher import Launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for axis, size in (("tp", 8), ("cp", 1), ("dp", 128), ("pp", 16)):
        parser.add_argument(f"--{axis}", type=int, default=size)
    parser.add_argument("--rank", type=int, default=0)
    sizes = parser.parse_args()
    topology = Topology(tp=sizes.tp, cp=sizes.cp, dp=sizes.dp, pp=sizes.pp)
    launch = Launch(rank=sizes.rank, world_size=topology.world_size)

    began = time.perf_counter()
    init_process(launch, torch.device("cpu"), 60.0, backend="fake")
    joined = time.perf_counter()
    mesh = Mesh(topology)
    made = time.perf_counter()
    mesh.create()
    done = time.perf_counter()
    result = {
        "benchmark": "mesh",
        "world_size": topology.world_size,
        "layout": {axis: getattr(topology, axis) for axis in ("tp", "cp", "dp", "pp")},
        "rank": sizes.rank,
        "num_groups": mesh.num_groups_made,
        "init_ms": round((joined - began) * 1e3, 2),
        "mesh_ms": round((made - joined) * 1e3, 2),
        "groups_ms": round((done - made) * 1e3, 2),
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    end_process()


if __name__ == "__main__":
    main()
