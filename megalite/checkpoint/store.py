"""Changes of a folder of checkpoints: publishing, the `latest` pointer, leftovers, deletion.

names.py has the names. Does not look at tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.names import LATEST, REPLACED, TMP, TRASH, step_name
from megalite.errors import CheckpointError
from megalite.wording import number_of


def temporary_path(root: Path, step: int, attempt: str) -> Path:
    """The directory that a step is written to before it is published."""
    return root / f"{TMP}{step_name(step)}-{attempt}"


def remove_leftovers(root: Path, disk: Disk) -> None:
    """Remove what interrupted saves and deletions left. Call it only while nothing is being saved.

    A checkpoint that was moved aside and never replaced gets its name back. What cannot be removed
    stays: it is in nobody's way.
    """
    for path in sorted(root.iterdir()):
        final = root / path.name.removeprefix(REPLACED)
        if path.name.startswith(REPLACED) and not final.exists():
            disk.rename(path, final)
        elif path.name.startswith((TMP, TRASH, REPLACED)):
            with contextlib.suppress(OSError):
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
            raise CheckpointError(
                f"{path} has {number_of(size_bytes, 'byte')}, the manifest says {wanted}"
            )


def delete(root: Path, checkpoints: Iterable[Path], disk: Disk) -> None:
    """Delete checkpoints of `root`. One rank calls it, once newer ones are safe. Raises OSError."""
    # All are renamed first: an interrupted deletion must not look like a damaged checkpoint, also
    # after a loss of power.
    trash = []
    for path in checkpoints:
        trash.append(path.with_name(f"{TRASH}{path.name}"))
        disk.remove(trash[-1])
        disk.rename(path, trash[-1])
    if trash:
        disk.sync_dir(root)
    for path in trash:
        disk.remove(path)
