"""Which checkpoints a folder holds: names, order, the `latest` pointer, leftovers, retention.

A checkpoint is a directory `step-00001000`. Hidden names beside it are never loaded by name:
`.tmp-*` is being written, `.trash-*` being deleted, `.replaced-step-*` an older checkpoint of a
step that is being saved again. Does not look at tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.errors import CheckpointError

LATEST = "latest"
_TMP, _TRASH, _REPLACED = ".tmp-", ".trash-", ".replaced-"
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Directory name of a step: `step-00001000`."""
    return f"step-{step:08d}"


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every finished checkpoint in `root`, oldest step first.

    Order is by number. A step whose replacement was cut short counts with its old directory.
    Says nothing about whether they are sound.
    """
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        # ".replaced-" sorts before "step-", so a finished directory takes its place
        step = step_of(path.name)
        if step is not None and path.is_dir():
            found[step] = path
    return sorted(found.items())


def step_of(name: str) -> int | None:
    """Step of a finished checkpoint directory's name, or None when it is not such a name."""
    match = _STEP.fullmatch(name.removeprefix(_REPLACED))
    step = int(match[1]) if match else None
    return step if step is not None and match and match[0] == step_name(step) else None


def temporary(root: Path, step: int, attempt: str) -> Path:
    """Where a step is written before it is published."""
    return root / f"{_TMP}{step_name(step)}-{attempt}"


def clean(root: Path, disk: Disk) -> None:
    """Remove what interrupted saves and deletions left. Only while nothing else is saving.

    A checkpoint that was moved aside and never replaced gets its name back.
    """
    for path in sorted(root.iterdir()):
        final = root / path.name.removeprefix(_REPLACED)
        if path.name.startswith(_REPLACED) and not final.exists():
            disk.rename(path, final)
        elif path.name.startswith((_TMP, _TRASH, _REPLACED)):
            disk.remove(path)


def publish(root: Path, step: int, written: Path, disk: Disk) -> Path:
    """Give a complete, synced temporary directory its final name, then move the pointer.

    An existing checkpoint of the same step stays loadable until the new one is in place.
    """
    final = root / step_name(step)
    replaced = root / f"{_REPLACED}{final.name}"
    if final.exists():
        disk.rename(final, replaced)
        disk.sync_dir(root)
    disk.rename(written, final)
    disk.sync_dir(root)
    point_latest(root, final, disk)
    if replaced.exists():
        disk.remove(replaced)
    return final


def point_latest(root: Path, final: Path, disk: Disk) -> None:
    """Write the `latest` pointer file: advice for people and scripts, never used to load.

    A directory of that name is somebody's and stays; a link there is replaced, not followed.
    """
    pointer = root / f"{_TMP}{LATEST}"
    if (root / LATEST).is_dir() and not (root / LATEST).is_symlink():
        return
    disk.remove(pointer)
    disk.write_file(pointer, f"{final.name}\n".encode())
    disk.rename(pointer, root / LATEST)
    disk.sync_dir(root)


def check_sizes(directory: Path, manifest: Manifest, names: list[str]) -> None:
    """Check that files are there, inside the directory, with their size. Raises CheckpointError."""
    for name in names:
        path, wanted = directory / name, manifest.files[name].size_bytes
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.resolve().parent != directory.resolve():
            raise CheckpointError(f"{path} leads out of the checkpoint directory")
        size_bytes = path.stat().st_size
        if size_bytes != wanted:
            raise CheckpointError(f"{path} has {size_bytes} bytes, the manifest says {wanted}")


def prune(root: Path, keep: int, saved_step: int, disk: Disk | None = None) -> list[int]:
    """Delete old checkpoints, keeping `keep` with the just saved one; returns the steps deleted.

    One rank calls it, after `save` returned. Only complete checkpoints (manifest reads, files
    have their size) count as kept; steps above `saved_step` are another branch of the run and
    stay. Raises CheckpointError if the saved one is not there, OSError.
    """
    assert keep >= 1, "keep counts the checkpoint just saved"
    older = [(step, path) for step, path in list_steps(root) if step <= saved_step]
    if not older or older[-1][0] != saved_step:
        raise CheckpointError(f"{root / step_name(saved_step)} is not there; nothing is deleted")
    sound = [step for step, path in older[:-1] if _complete(path)]
    kept = {saved_step, *sound[max(0, len(sound) - (keep - 1)) :]}
    doomed = [(step, path) for step, path in older if step not in kept]
    for _, path in doomed:
        _delete(path, disk or Disk())
    return [step for step, _ in doomed]


def discard_after(root: Path, step: int, disk: Disk | None = None) -> list[int]:
    """Delete every checkpoint above `step`, so that a rolled-back run cannot resume from them.

    One rank calls it. Returns the steps deleted, newest first. Raises OSError.
    """
    disk = disk or Disk()
    steps = list_steps(root)
    doomed = [(s, path) for s, path in reversed(steps) if s > step]
    for _, path in doomed:
        _delete(path, disk)
    if doomed and len(steps) > len(doomed):
        point_latest(root, steps[-len(doomed) - 1][1], disk)
    return [s for s, _ in doomed]


def _complete(path: Path) -> bool:
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest, list(manifest.files))
    except CheckpointError:
        return False
    return True


def _delete(path: Path, disk: Disk) -> None:
    # renamed first: a deletion cut short must not look like a damaged checkpoint
    trash = path.with_name(f"{_TRASH}{path.name}")
    if trash.exists():
        disk.remove(trash)
    disk.rename(path, trash)
    disk.remove(trash)
