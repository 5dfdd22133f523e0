"""Saves that die or fail at every single step: an older or the new checkpoint always loads."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.find import find_latest, open_checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.names import list_steps
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.save import save
from megalite.checkpoint.store import delete
from megalite.distributed.agree import Ranks
from megalite.errors import CheckpointError
from tests.checkpoint.kit import (
    Cut,
    StepDisk,
    check_loads,
    disk_that_is_full_at,
    disk_that_kills_at,
    in_child,
    make_globals,
    make_pieces,
    ok,
    run_ranks,
    save_globals,
    save_whole,
)

CUT = Cut(1, 2)
OLD, NEW = make_globals(seed=10), make_globals(seed=11)


def steps_to_break(root: Path, step: int) -> list[int]:
    """Indices of the changes that saving `step` over what is in `root` makes to the file system.

    Of many writes to one file in a row, the first and the last.
    """
    disk = StepDisk()
    ok(save_globals(root, step, NEW, CUT, disk))
    log = ["", *disk.log, ""]
    return [i - 1 for i in range(1, len(log) - 1) if not log[i - 1] == log[i] == log[i + 1]]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds step 1; copied by tests that break it."""
    root = tmp_path_factory.mktemp("old")
    ok(save_globals(root, 1, OLD, CUT))
    return root


def dies(root: Path, step: int, disk: StepDisk) -> bool:
    """Save in a process of its own; whether that was killed."""

    def work() -> None:
        ok(save_globals(root, step, NEW, CUT, disk))

    return in_child(work) == -9


def hidden(root: Path) -> list[str]:
    return [p.name for p in root.iterdir() if p.name.startswith(".")]


def test_each_thing_is_synced_before_the_next(tmp_path: Path) -> None:
    disk = StepDisk()
    ok(save_globals(tmp_path, 1, OLD, CUT, disk))
    ok(save_globals(tmp_path, 1, NEW, CUT, disk))
    first_save = disk.log.index("rename latest") + 2
    for log in (disk.log[:first_save], disk.log[first_save:]):
        temporary = next(e.split()[1] for e in log if "make_dir .tmp-step-00000001" in e)
        order = [
            *(f"sync_file rank-{r:05d}.safetensors" for r in range(2)),
            "create manifest.json",
            "sync_file manifest.json",
            f"sync_dir {temporary}",
            "rename step-00000001",
            f"sync_dir {tmp_path.name}",
            "sync_file .tmp-latest",
            "rename latest",
        ]
        position = [log.index(entry) for entry in order[2:5]]
        assert max(log.index(entry) for entry in order[:2]) < position[0]
        published = log.index(order[5])
        tail = log[published:]
        positions = [tail.index(entry) for entry in order[5:]]
        assert [*position, *(published + i for i in positions)] == sorted(
            [*position, *(published + i for i in positions)]
        )
        assert not any("rank-" in e or "manifest" in e for e in tail)
    assert disk.log[-1] == "remove .replaced-step-00000001"
    assert not disk.unsynced


@pytest.mark.long
@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the only step again"])
def test_killed_at_each_step(tmp_path: Path, old: Path, step: int) -> None:
    chosen = set()
    for index in steps_to_break(shutil.copytree(old, tmp_path / "trial"), step):
        root = shutil.copytree(old, tmp_path / f"killed-{index}")
        disk = disk_that_kills_at(index)
        assert dies(root, step, disk), index
        found = find_latest(root)
        assert found is not None, index
        assert found.skipped == (), index
        newer = found.manifest.step == 2 or _is_new(root)
        check_loads(root, found.manifest.step, NEW if newer else OLD, Cut(1, 1))
        chosen.add(newer)
        # the restarted run gets past the step it died in, and leaves nothing behind
        ok(save_globals(root, step, NEW, CUT))
        check_loads(root, step, NEW, Cut(1, 1))
        assert hidden(root) == [], index
        assert len(list(root.glob("step-*"))) == step
    assert chosen == {False, True}


def _is_new(root: Path) -> bool:
    """Whether the newest checkpoint holds NEW; a mix of both fails the comparison that follows."""
    found = find_latest(root)
    assert found is not None
    piece = make_pieces(Cut(1, 1), 0, None)[0]
    load(found, [piece], whole_kinds=())
    return torch.equal(piece.data, make_pieces(Cut(1, 1), 0, NEW)[0].data)


@pytest.mark.long
def test_one_that_was_moved_aside_and_never_replaced_stays(tmp_path: Path, old: Path) -> None:
    """Killed between the two renames; then the next save fails too."""
    root = shutil.copytree(old, tmp_path / "root")
    (root / "step-00000001").rename(root / ".replaced-step-00000001")
    check_loads(root, 1, OLD, Cut(1, 1))
    for index in steps_to_break(shutil.copytree(root, tmp_path / "trial"), 2):
        again = shutil.copytree(root, tmp_path / f"again-{index}")
        assert dies(again, 2, disk_that_kills_at(index)), index
        found = find_latest(again)
        assert found is not None, index
    assert (tmp_path / "trial" / "step-00000001").is_dir()


@pytest.mark.long
def test_killed_during_the_first_save_ever(tmp_path: Path) -> None:
    for index in steps_to_break(tmp_path / "trial", 7):
        root = tmp_path / f"killed-{index}"
        disk = disk_that_kills_at(index)
        assert dies(root, 7, disk), index
        if find_latest(root) is not None:
            check_loads(root, 7, NEW, Cut(1, 1))
        ok(save_globals(root, 8, NEW, CUT))
        check_loads(root, 8, NEW, Cut(1, 1))
        assert hidden(root) == []


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the only step again"])
def test_disk_full_at_each_step_is_everyones_error(tmp_path: Path, old: Path, step: int) -> None:
    for index in steps_to_break(shutil.copytree(old, tmp_path / "trial"), step):
        root = shutil.copytree(old, tmp_path / f"full-{index}")
        disk = disk_that_is_full_at(index)
        errors = save_globals(root, step, NEW, CUT, disk)
        assert all(isinstance(e, CheckpointError) for e in errors), (index, disk.log)
        assert len({str(e) for e in errors}) == 1
        assert f"saving step {step}" in str(errors[0])
        assert os.strerror(errno.ENOSPC) in str(errors[0])
        published = f"rename step-{step:08d}" in disk.log[:index]
        check_loads(root, step if published else 1, NEW if published else OLD, Cut(1, 1))
        assert not [n for n in hidden(root) if n.startswith(".tmp-step")], index
        ok(save_globals(root, step, NEW, CUT))
        assert hidden(root) == []


def saved_steps(root: Path, *steps: int) -> None:
    for step in steps:
        save_whole(root, step, {"w": torch.full((3,), float(step))})


def delete_first_two(root: Path, disk: StepDisk) -> None:
    delete(root, [path for _, path in list_steps(root)[:2]], disk)


def test_killed_at_each_step_of_a_deletion(tmp_path: Path) -> None:
    saved_steps(tmp_path / "old", 1, 2, 3)
    trial = StepDisk()
    delete_first_two(shutil.copytree(tmp_path / "old", tmp_path / "trial"), trial)
    assert [step for step, _ in list_steps(tmp_path / "trial")] == [3]
    assert hidden(tmp_path / "trial") == []
    left = set()
    for index in range(len(trial.log)):
        root = shutil.copytree(tmp_path / "old", tmp_path / f"killed-{index}")
        assert in_child(partial(delete_first_two, root, disk_that_kills_at(index))) == -9
        for _, path in list_steps(root):
            open_checkpoint(path)
        steps = tuple(step for step, _ in list_steps(root))
        left.add(steps)
        # The next save removes what is left of the deleted ones.
        saved_steps(root, 4)
        assert hidden(root) == []
        assert [step for step, _ in list_steps(root)] == [*steps, 4]
    assert left == {(1, 2, 3), (2, 3), (3,)}


def test_a_leftover_that_cannot_be_removed_fails_no_save(tmp_path: Path) -> None:
    class Stubborn(StepDisk):
        def remove(self, path: Path) -> None:
            if path.name.startswith(".trash-"):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            super().remove(path)

    (tmp_path / ".trash-step-00000001").mkdir(parents=True)
    save_whole(tmp_path, 2, {"w": torch.ones(3)}, disk=Stubborn())
    assert hidden(tmp_path) == [".trash-step-00000001"]
    save_whole(tmp_path, 3, {"w": torch.ones(3)})
    assert hidden(tmp_path) == []


def test_the_message_names_the_rank_and_the_file(tmp_path: Path) -> None:
    class OneRankIsFull(StepDisk):
        def write(self, file: Any, data: Any) -> None:
            if "rank-00001" in file.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(file, data)

    errors = save_globals(tmp_path, 3, NEW, CUT, OneRankIsFull())
    for error in errors:
        assert "rank 1: " in str(error)
        assert "rank-00001.safetensors" in str(error)
        assert "No space left" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    ok(save_globals(tmp_path, 1, OLD, CUT))

    def too_large() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors .*File too large"):
            save_whole(tmp_path, 2, {"w": torch.zeros(1 << 20)})
        assert hidden(tmp_path) == []
        check_loads(tmp_path, 1, OLD, CUT)

    assert in_child(too_large) == 0
    check_loads(tmp_path, 1, OLD, CUT)


def test_a_rank_that_raises_anything_stops_all(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        dtype = torch.complex64 if ranks.rank == 1 else torch.float32
        piece = NamedPiece.whole(f"w{ranks.rank}", torch.ones(2, dtype=dtype))
        save(tmp_path, 1, [piece], state={}, config="", layout={}, ranks=ranks)

    errors = run_ranks(3, work)
    assert all("rank 1: cannot store dtype complex64" in str(e) for e in errors)
    assert list(tmp_path.iterdir()) == []


def whole(owner: bool = True, value: Tensor | None = None) -> NamedPiece:
    return NamedPiece.whole("w", torch.ones(4) if value is None else value, owner)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([whole(owner=False), whole(owner=False)], "w is not complete: 0 of 4"),
        ([whole(), whole()], "w is not complete: .*overlap"),
        ([whole(), whole(owner=False, value=torch.ones(5))], "w: pieces disagree on shape"),
        (
            [whole(), whole(owner=False, value=torch.ones(4, dtype=torch.float64))],
            "w: pieces disagree on dtype",
        ),
    ],
)
def test_incomplete_or_contradicting_pieces_are_not_published(
    tmp_path: Path, pieces: list[NamedPiece], message: str
) -> None:
    def work(ranks: Ranks) -> None:
        mine = [pieces[ranks.rank]]
        save(tmp_path, 1, mine, state={}, config="", layout={}, ranks=ranks)

    for error in run_ranks(2, work):
        assert isinstance(error, Exception)
        with pytest.raises(CheckpointError, match=message):
            raise error
    assert list(tmp_path.iterdir()) == []


def test_the_same_piece_twice_on_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="w is handed in twice"):
        save(tmp_path, 1, [whole(), whole()], state={}, config="", layout={})


def test_a_root_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="saving step 1"):
        save_whole(tmp_path / "file", 1, {"w": torch.ones(1)})


def test_a_shard_that_rank_0_cannot_see_is_not_published(tmp_path: Path) -> None:
    class OtherNode(StepDisk):
        def sync_file(self, file: Any) -> None:
            super().sync_file(file)
            if "rank-00001" in file.name:
                Path(file.name).unlink()

    errors = save_globals(tmp_path, 1, NEW, CUT, OtherNode())
    assert all("file system that all nodes share" in str(e) for e in errors)
    assert find_latest(tmp_path) is None


def test_a_file_that_vanishes_between_opening_and_loading_is_named(tmp_path: Path) -> None:
    path = save_whole(tmp_path, 1, {"w": torch.ones(3)})
    found = open_checkpoint(path)
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be read"):
        load(found, [NamedPiece.whole("w", torch.zeros(3))])


def test_a_shard_that_holds_something_else_is_named(tmp_path: Path) -> None:
    """Size and hash agree with the manifest, the key inside does not."""
    path = save_whole(tmp_path, 1, {"w": torch.ones(3)})
    found = open_checkpoint(path)
    shard = path / "rank-00000.safetensors"
    for old, new in [(b'"w"', b'"v"'), (b"F32", b"I32")]:
        intact = shard.read_bytes()
        shard.write_bytes(intact.replace(old, new))
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
            load(found, [NamedPiece.whole("w", torch.zeros(3))])
        shard.write_bytes(intact)
    assert json.loads(intact[8 : intact.index(b"}}") + 2])["w"]["dtype"] == "F32"
