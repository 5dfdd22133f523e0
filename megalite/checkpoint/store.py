"""Changes of a folder of checkpoints: publishing, the `latest` pointer, leftovers, retention.

names.py has the names. Does not look at tensors.
"""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.names import LATEST, REPLACED, TMP, TRASH, list_steps, step_name
from megalite.errors import CheckpointError


def temporary_path(root: Path, step: int, attempt: str) -> Path:
    """The directory that a step is written to before it is published."""
    return root / f"{TMP}{step_name(step)}-{attempt}"


def remove_leftovers(root: Path, disk: Disk) -> None:
    """Remove what interrupted saves and deletions left. Call it only while nothing is being saved.

    A checkpoint that was moved aside and never replaced gets its name back.
    """
    for path in sorted(root.iterdir()):
        final = root / path.name.removeprefix(REPLACED)
        if path.name.startswith(REPLACED) and not final.exists():
            disk.rename(path, final)
        elif path.name.startswith((TMP, TRASH, REPLACED)):
            disk.remove(path)


def publish(root: Path, step: int, written: Path, disk: Disk) -> Path:
    """Rename a complete, synced temporary directory to its final name; returns that path.

    Then updates the `latest` pointer. An existing checkpoint of the same step stays loadable until
    the new one is in place.
    """
    final = root / step_name(step)
    replaced = root / f"{REPLACED}{final.name}"
    if final.exists():
        # A rename cannot replace a directory with content, so the old one is moved aside first.
        disk.rename(final, replaced)
        disk.sync_dir(root)
    disk.rename(written, final)
    disk.sync_dir(root)
    write_latest(root, final, disk)
    if replaced.exists():
        disk.remove(replaced)
    return final


def write_latest(root: Path, final: Path, disk: Disk) -> None:
    """Write the `latest` pointer file: for people and scripts, never used to load.

    If there is a directory of that name, nothing is written; a symbolic link is replaced, not
    followed.
    """
    pointer = root / f"{TMP}{LATEST}"
    if (root / LATEST).is_dir() and not (root / LATEST).is_symlink():
        return
    disk.remove(pointer)
    disk.write_file(pointer, f"{final.name}\n".encode())
    disk.rename(pointer, root / LATEST)
    disk.sync_dir(root)


def check_sizes(directory: Path, manifest: Manifest, names: list[str]) -> None:
    """Raise CheckpointError unless files exist inside the directory with the manifest's size."""
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
    """Delete old checkpoints, keeping `keep` including the one just saved; returns steps deleted.

    One rank calls it, after `save` returned. Only complete checkpoints (the manifest can be read,
    files have their size) are counted and kept; steps above `saved_step` are of another branch of
    the run and stay. Raises CheckpointError if the saved one does not exist, and OSError.
    """
    assert keep >= 1, "keep counts the checkpoint just saved"
    older = [(step, path) for step, path in list_steps(root) if step <= saved_step]
    if not older or older[-1][0] != saved_step:
        raise CheckpointError(f"{root / step_name(saved_step)} is not there; nothing is deleted")
    complete = [step for step, path in older[:-1] if _is_complete(path)]
    first_kept = max(0, len(complete) - (keep - 1))  # the last keep - 1; none for keep = 1
    kept = {saved_step, *complete[first_kept:]}
    deleted = [(step, path) for step, path in older if step not in kept]
    for _, path in deleted:
        _delete(path, disk or Disk())
    return [step for step, _ in deleted]


def discard_after(root: Path, step: int, disk: Disk | None = None) -> list[int]:
    """Delete every checkpoint above `step`; a run that was rolled back must not resume from them.

    One rank calls it. Returns the steps deleted, newest first. Raises OSError.
    """
    disk = disk or Disk()
    steps = list_steps(root)
    kept = [path for found, path in steps if found <= step]
    deleted = [(found, path) for found, path in reversed(steps) if found > step]
    for _, path in deleted:
        _delete(path, disk)
    if deleted and kept:
        write_latest(root, kept[-1], disk)
    return [found for found, _ in deleted]


def _is_complete(path: Path) -> bool:
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest, list(manifest.files))
    except CheckpointError:
        return False
    return True


def _delete(path: Path, disk: Disk) -> None:
    # Renamed first: an interrupted deletion must not look like a damaged checkpoint.
    trash = path.with_name(f"{TRASH}{path.name}")
    if trash.exists():
        disk.remove(trash)
    disk.rename(path, trash)
    disk.remove(trash)
