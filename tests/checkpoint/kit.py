"""What the checkpoint tests share: ranks as threads, a small sharded state, faulty disks."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.find import find_latest
from megalite.checkpoint.load import load
from megalite.checkpoint.names import MANIFEST
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.save import save
from megalite.distributed.agree import Ranks
from megalite.layout.sharding import ShardSpec

T = TypeVar("T")

SPECS = [
    ShardSpec("embedding.weight", (12, 7), 0),
    ShardSpec("layers.0.qkv.weight", (20, 5), 0),
    ShardSpec("layers.0.out.weight", (5, 8), 1),
    ShardSpec("layers.0.norm.weight", (7,)),
    ShardSpec("layers.0.experts", (3, 4, 5), 1),
    ShardSpec("scale", ()),
]


class NoSyncDisk(Disk):
    """Takes no time to sync; a test that kills a process does not lose the page cache anyway."""

    def sync_file(self, file: BinaryIO) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


NO_SYNC = NoSyncDisk()


class Hub:
    """Where the threads of one simulated group leave their messages."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.slots: list[Any] = [None] * world_size


class ThreadRanks(Ranks):
    """One simulated rank, over a Hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, len(hub.slots)

    def any(self, flag: bool) -> bool:
        return any(self._exchange(flag))

    def gather(self, value: Any) -> list[Any]:
        everyone = self._exchange(value)
        return everyone if self.rank == 0 else []

    def broadcast(self, value: Any) -> Any:
        return self._exchange(value)[0]

    def _exchange(self, value: Any) -> list[Any]:
        """Everyone's value, as it arrives on another rank."""
        self.hub.slots[self.rank] = json.dumps(value)
        self.hub.barrier.wait()
        found = [json.loads(slot) for slot in self.hub.slots]
        self.hub.barrier.wait()
        return found


def run_ranks(world_size: int, work: Callable[[Ranks], T]) -> list[T | Exception]:
    """Run `work` on every simulated rank; what each returned or raised."""
    if world_size == 1:
        return [work(Ranks())]
    hub = Hub(world_size)
    outcome: list[Any] = [None] * world_size

    def one(rank: int) -> None:
        try:
            outcome[rank] = work(ThreadRanks(hub, rank))
        except Exception as error:
            outcome[rank] = error

    threads = [threading.Thread(target=one, args=(r,)) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def ok(outcome: Sequence[T | Exception]) -> list[T]:
    """The results, or the first error raised again."""
    results: list[T] = []
    for item in outcome:
        if isinstance(item, Exception):
            raise item
        results.append(item)
    return results


@dataclass(frozen=True)
class Cut:
    """How many ways the state is cut; rank = tp_rank + tp * dp_rank."""

    tp: int
    dp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.dp


def make_globals(seed: int) -> dict[str, torch.Tensor]:
    """Global tensors by name: bf16 parameters, fp64 masters."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for spec in SPECS:
        values = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        state[f"param/{spec.name}"] = values.to(torch.bfloat16)
        state[f"master/{spec.name}"] = values
    return state


def local_part(spec: ShardSpec, value: torch.Tensor, cut: Cut, tp_rank: int) -> torch.Tensor:
    """One tp rank's shard of a global tensor."""
    box = zip(spec.local_offsets(cut.tp, tp_rank), spec.local_shape(cut.tp), strict=True)
    return value[tuple(slice(o, o + n) for o, n in box)].contiguous()


def make_pieces(cut: Cut, rank: int, state: dict[str, torch.Tensor] | None) -> list[NamedPiece]:
    """A rank's pieces, filled from the global state or (None) with a value that is nowhere in it.

    Parameters are whole tp shards, held by all dp ranks; masters are the ranges that one dp rank
    owns of the flat buffer of all shards, padded to a multiple of dp, as under ZeRO-1.
    """
    dp_rank, tp_rank = divmod(rank, cut.tp)
    sizes = [math.prod(spec.local_shape(cut.tp)) for spec in SPECS]
    share = math.ceil(sum(sizes) / cut.dp)
    low, high = dp_rank * share, (dp_rank + 1) * share
    pieces, first = [], 0
    for spec, size in zip(SPECS, sizes, strict=True):
        start, stop = (min(max(edge - first, 0), size) for edge in (low, high))
        first += size
        one_tp = spec.cut_dim is not None or tp_rank == 0
        for kind, a, b, owner in [
            ("param", 0, size, one_tp and dp_rank == 0),
            ("master", start, stop, one_tp),
        ]:
            dtype = torch.bfloat16 if kind == "param" else torch.float64
            data = torch.full((b - a,), 77.0, dtype=dtype)
            if state is not None:
                data = local_part(spec, state[f"{kind}/{spec.name}"], cut, tp_rank).view(-1)[a:b]
            pieces.append(NamedPiece.of_shard(kind, spec, cut.tp, tp_rank, data, a, owner))
    return pieces


def save_globals(
    root: Path, step: int, state: dict[str, torch.Tensor], cut: Cut, disk: Disk = NO_SYNC
) -> list[Path | Exception]:
    """Save the state from every rank of a cut; what each rank returned or raised."""

    def work(ranks: Ranks) -> Path:
        pieces = make_pieces(cut, ranks.rank, state)
        layout = {"tp": cut.tp, "dp": cut.dp}
        trainer = {"step": step, "sampler": [1, 2.5, None]}
        return save(
            root,
            step,
            pieces,
            state=trainer,
            config="x = 1\n",
            layout=layout,
            ranks=ranks,
            disk=disk,
        )

    return run_ranks(cut.world_size, work)


def check_loads(root: Path, step: int, state: dict[str, torch.Tensor], cut: Cut) -> None:
    """Every rank of `cut` finds `step` as the newest and loads exactly its part of `state`."""

    def work(ranks: Ranks) -> None:
        found = find_latest(root, ranks)
        assert found is not None
        assert found.manifest.step == step
        pieces = make_pieces(cut, ranks.rank, None)
        load(found, pieces, ranks)
        for piece, wanted in zip(pieces, make_pieces(cut, ranks.rank, state), strict=True):
            assert torch.equal(piece.data, wanted.data), piece.name

    ok(run_ranks(cut.world_size, work))


def save_whole(root: Path, step: int, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    """Save whole tensors from one process."""
    pieces = [NamedPiece.whole(name, data) for name, data in tensors.items()]
    rest: dict[str, Any] = {"state": {"step": step}, "config": {}, "layout": {}, "disk": NO_SYNC}
    return save(root, step, pieces, ranks=Ranks(), **{**rest, **fields})


@dataclass
class StepDisk(NoSyncDisk):
    """Counts and names every change; `before(index, name)` may raise or end the process there."""

    before: Callable[[int, str], None] = lambda index, name: None
    log: list[str] = field(default_factory=list)
    unsynced: set[Path] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def _step(self, what: str, path: Path) -> None:
        with self.lock:
            self.log.append(f"{what} {path.name}")
            self.before(len(self.log) - 1, self.log[-1])

    def make_dir(self, path: Path) -> None:
        self._step("make_dir", path)
        super().make_dir(path)

    def create(self, path: Path) -> BinaryIO:
        self._step("create", path)
        self.unsynced.add(path)
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        half = len(data) // 2
        super().write(file, data[:half])
        self._step("write", Path(file.name))
        super().write(file, data[half:])

    def sync_file(self, file: BinaryIO) -> None:
        self._step("sync_file", Path(file.name))
        super().sync_file(file)
        self.unsynced.discard(Path(file.name))

    def sync_dir(self, path: Path) -> None:
        self._step("sync_dir", path)
        super().sync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename", target)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._step("remove", path)
        super().remove(path)


def disk_that_kills_at(index: int) -> StepDisk:
    """Ends the process by SIGKILL before step `index`; what was not synced is lost, as at power
    loss."""
    disk = StepDisk()

    def before(step: int, name: str) -> None:
        if step == index:
            for path in disk.unsynced:
                if path.exists():
                    os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    disk.before = before
    return disk


def disk_that_is_full_at(index: int) -> StepDisk:
    """Raises "no space left" at step `index`, once."""

    def before(step: int, name: str) -> None:
        if step == index:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return StepDisk(before=before)


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; its wait status (0: returned, -9: killed, 1: raised)."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change a manifest's content and sign it again, as an attacker or a bug of ours could."""
    body = json.loads((path / MANIFEST).read_bytes())["manifest"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / MANIFEST).write_text(f'{{"sha256":"{digest}","manifest":{text}}}')
