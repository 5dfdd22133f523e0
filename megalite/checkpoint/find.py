"""Choosing and verifying a checkpoint; loading takes only a checkpoint that was opened here.

The newest directory whose manifest and files verify counts; the `latest` pointer is not read. All
ranks take part: they share the hashing and agree on the result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.names import folder_of, is_checkpoint, list_steps, step_name, step_of
from megalite.checkpoint.store import check_sizes
from megalite.distributed.agree import ALONE, Ranks, on_all_ranks, on_first_rank
from megalite.errors import CheckpointError, ConfigError

Verify = Literal["sha256", "size"]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, or another format's folder that is read as one.

    `skipped`: the problems of newer ones that are bad, newest first. `notes`: what a reader of
    another format reports.
    """

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_latest(root: Path, ranks: Ranks = ALONE, verify: Verify = "sha256") -> Checkpoint | None:
    """The newest sound checkpoint in `root`, or None when it holds none at all. All ranks call it.

    A bad one is verified once and passed over; its message, which names the file, goes to
    `skipped`. Raises CheckpointError if there are checkpoints and every one is bad.
    """
    skipped: list[str] = []
    for name in _newest_first(root, ranks):
        try:
            found = open_checkpoint(root / name, ranks, verify)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return Checkpoint(found.path, found.manifest, tuple(skipped))
    if skipped:
        problems = "\n  ".join(skipped)
        raise CheckpointError(f"no checkpoint in {root} is usable:\n  {problems}")
    return None


def find_checkpoint(
    path: Path, ranks: Ranks = ALONE, verify: Verify = "sha256", step: int | None = None
) -> Checkpoint:
    """The checkpoint `path`, or that of `step` or the newest sound one in the folder it leads to.

    `path` is a checkpoint, a run, a folder of checkpoints or its `latest` pointer. All ranks call
    it. Raises CheckpointError, and ConfigError for a step of what is a checkpoint itself.
    """
    is_one, folder = on_first_rank(ranks, lambda: (is_checkpoint(path), str(folder_of(path))))
    if is_one and step is not None:
        raise ConfigError(f"step {step} has no effect on {path}, which is a checkpoint itself")
    if is_one or step is not None:
        named = path if step is None else Path(folder) / step_name(step)
        return open_checkpoint(named, ranks, verify)
    found = find_latest(Path(folder), ranks, verify)
    if found is None:
        there = "holds no checkpoint" if path.is_dir() else "is no folder"
        raise CheckpointError(
            f"{path} {there if path.exists() else 'does not exist'}; give a "
            "checkpoint, or the folder of a run that has saved (at its end, on a signal, every "
            "checkpoint.interval steps and interval_s seconds)"
        )
    return found


def _newest_first(root: Path, ranks: Ranks) -> list[str]:
    """Directory names as rank 0 lists them: all ranks must verify the same ones."""

    def names() -> list[str]:
        return [path.name for _, path in reversed(list_steps(root))]

    return on_first_rank(ranks, names, f"looking for checkpoints in {root}")


def open_checkpoint(path: Path, ranks: Ranks = ALONE, verify: Verify = "sha256") -> Checkpoint:
    """Verify the checkpoint directory `path` (`root/step-00001000`). All ranks call it.

    "sha256" hashes every file once, shared over the ranks; "size" only looks at sizes. Raises
    CheckpointError, the same on all ranks, naming what is missing (and what there is) or bad.
    """

    def check() -> Manifest:
        if not path.is_dir():
            raise CheckpointError(f"{path} does not exist; {_existing(path.parent)}")
        if list_steps(path):
            raise CheckpointError(f"{path} is a folder of checkpoints; {_existing(path)}")
        manifest = read_manifest(path)
        if step_of(path.name) not in (manifest.step, None):
            raise CheckpointError(f"{path} holds step {manifest.step}; give it its name back")

        # Each rank verifies every size-th file; together they verify all.
        mine = sorted(manifest.files)[ranks.rank :: ranks.size]
        check_sizes(path, manifest, mine)
        if verify == "sha256":
            check_hashes(path, manifest, mine)
        return manifest

    return Checkpoint(path, on_all_ranks(ranks, check, f"checkpoint {path.name}"))


def check_hashes(directory: Path, manifest: Manifest, names: list[str]) -> None:
    """Check files against their sha256 in the manifest. Raises CheckpointError naming the file."""
    for name in names:
        try:
            with (directory / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{directory / name} cannot be read: {error.strerror}") from error
        wanted = manifest.files[name].sha256
        if found != wanted:
            raise CheckpointError(
                f"{directory / name} is damaged: sha256 is {found[:16]}..., "
                f"the manifest says {wanted[:16]}..."
            )


def _existing(root: Path) -> str:
    names = [path.name for _, path in list_steps(root)]
    if not names:
        return f"{root} holds no checkpoint"
    return f"there are: {', '.join(names)}"
