"""The process that records: steps of the real trainer on the pretended device.

`python -m tests.gpu.kit.child SHIM FOLDER` reads cases from FOLDER/cases.json and writes a file of
traces for each. Nothing here imports torch before the shim is loaded.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu.kit import shim
from tests.gpu.kit.case import Case


def main() -> None:
    shim.load(Path(sys.argv[1]))
    folder = Path(sys.argv[2])
    from tests.gpu.kit import trace
    from tests.gpu.kit.device import pretend

    device = pretend()
    for number, values in enumerate(json.loads((folder / "cases.json").read_text())):
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        case = Case(**values | lists)
        ranks = case.ranks or range(case.world_size)
        traces = [record(case, rank, device, folder) for rank in ranks]
        trace.write(folder / f"{number}.jsonl", traces)


def record(case: Case, rank: int, device: Any, folder: Path) -> Any:
    """The trace of one rank's steps."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megalite.checks import open_run
    from megalite.distributed import comm
    from megalite.distributed.ledger import Ledger
    from megalite.distributed.mesh import Mesh
    from megalite.layout.topology import Topology
    from megalite.process.env import init_process
    from megalite.process.launcher import Launch
    from megalite.process.signals import SignalFlag
    from megalite.record.console import Console
    from megalite.train import engine, loop
    from tests.gpu.kit.device import DEVICE
    from tests.gpu.kit.recorder import Operators

    recorder = device.begin(rank)
    config = open_run(case.config, case.overrides(dataset(folder)), case.world_size).config
    launch = Launch(rank, case.world_size, rank % 8, min(8, case.world_size), source="torchrun")

    def same(value: Any, axis: Any) -> list[Any]:
        """Every rank's object, where none can be read back: all are as this one."""
        return [json.loads(json.dumps(value))] * axis.size

    def key(self: Any, axis: Any) -> Any:
        return axis.ranks, "shared"

    def enter(self: Any, name: str) -> None:
        recorder.add("phase", f"{getattr(self, 'step', None) or 0} {name}")

    with ExitStack() as stack:

        def replace(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value, create=True))

        replace(engine, "init_params", lambda *_: None)
        replace(Ledger, "phase", property(lambda self: "", enter))
        for module in _users(comm.all_gather_object, "all_gather_object"):
            replace(module, "all_gather_object", same)
        if case.share_edge:
            replace(Mesh, "_key", key)
        init_process(launch, DEVICE, 60.0, backend="fake")
        stack.callback(dist.destroy_process_group)

        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Operators(recorder))
        mesh = Mesh(Topology.of(config.parallel), DEVICE, timeout_s=60.0)
        mesh.create()
        trainer = loop.Trainer(config, mesh, Console(quiet=True))
        trainer.clock.begin(1)
        for _ in range(case.steps):
            trainer._step(SignalFlag())
        recorder.add("phase", "end")
        trainer.engine.optimizer.wait_params()
        trainer._close()
    for work in recorder.in_flight:
        recorder.fault(f"{work.event.name} from {work.event.site} was never waited for")
    return recorder.trace


def dataset(folder: Path) -> str:
    """The prefix of a dataset of some tokens, made at the first call."""
    from megalite.corpus.indexed_writer import IndexedWriter

    prefix = folder / "data"
    if not prefix.with_suffix(".idx").exists():
        with IndexedWriter(prefix, 256) as writer:
            writer.add_document([number % 256 for number in range(1 << 18)])
            writer.publish()
    return str(prefix)


def _users(function: Any, name: str) -> list[Any]:
    """The modules that hold a function under its name."""
    return [m for m in list(sys.modules.values()) if getattr(m, name, None) is function]


if __name__ == "__main__":
    main()
