"""A folder of safetensors files that appears whole or not at all.

Each file is written as a stream, a tensor in memory at a time. Files are independent of each other,
so threads and ranks share them; what names them comes last, then the folder gets its name.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.manifest import FileEntry
from megalite.checkpoint.shard_file import write_stream
from megalite.distributed.agree import Ranks, on_all_ranks, on_first_rank
from megalite.errors import CheckpointError, ConfigError, cannot_write

MAX_FILE_BYTES = 5_000_000_000
_MAX_THREADS = 4
_METADATA = {"format": "pt"}  # which transformers wants to read


@dataclass(frozen=True)
class Item:
    """A tensor to write. `fill` puts its values into zeros of its type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: Callable[[torch.Tensor], None]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Files = Mapping[str, Sequence[Item]]
Finish = Callable[[Path, Mapping[str, FileEntry]], list[str]]


def files_of(items: Sequence[Item], max_bytes: int, stem: str) -> Files:
    """The items by file name, each file of at most so many bytes, or of one item."""
    groups: list[list[Item]] = []
    size = 0
    for one in items:
        if not groups or size + one.size_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.size_bytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    last = len(groups)
    return {f"{stem}-{i:05d}-of-{last:05d}.safetensors": g for i, g in enumerate(groups, start=1)}


def write_folder(folder: Path, files: Files, finish: Finish, ranks: Ranks) -> list[str]:
    """Write files as `folder`; all ranks call it, each writes its share.

    finish(directory, entries) writes on rank 0 what comes last; its lines are returned. Raises
    ConfigError if the folder exists, CheckpointError, the same on all ranks, if a file cannot be
    written.
    """
    disk = Disk()
    directory = Path(on_first_rank(ranks, lambda: _make(folder, disk)))

    def write(file: str) -> tuple[str, dict[str, Any]]:
        # Widest elements first: every tensor then starts at a multiple of its element size.
        items = sorted(files[file], key=lambda one: -one.dtype.itemsize)
        entries = [(one.name, one.dtype, one.shape) for one in items]
        try:
            made = write_stream(disk, directory / file, entries, map(_filled, items), _METADATA)
        except OSError as error:
            raise CheckpointError(cannot_write(directory / file, error)) from error
        return file, made.model_dump()

    def write_mine() -> list[tuple[str, dict[str, Any]]]:
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            return list(pool.map(write, sorted(files)[ranks.rank :: ranks.size]))

    def end(found: list[list[tuple[str, dict[str, Any]]]]) -> list[str]:
        entries = {file: FileEntry(**entry) for mine in found for file, entry in mine}
        try:
            lines = finish(directory, entries)
            disk.sync_dir(directory)
            disk.rename(directory, folder)
            disk.sync_dir(folder.absolute().parent)
        except OSError as error:
            raise CheckpointError(cannot_write(folder, error)) from error
        return lines

    try:
        found = ranks.gather(on_all_ranks(ranks, write_mine, f"writing {folder}"))
        return on_first_rank(ranks, lambda: end(found), f"writing {folder}")
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _filled(item: Item) -> torch.Tensor:
    data = torch.zeros(item.shape, dtype=item.dtype)
    item.fill(data)
    return data


def _make(folder: Path, disk: Disk) -> str:
    """Make the temporary directory that becomes `folder`."""
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists; give a new name, or remove it")
    directory = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    try:
        disk.make_dir(directory)
    except OSError as error:
        raise CheckpointError(cannot_write(directory, error)) from error
    return str(directory)


def put_json(directory: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people to read. Raises OSError."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    Disk().write_file(directory / name, text.encode())
