"""A Hugging Face folder converted to a checkpoint and a `[model]` table.

The checkpoint has the weights in the types that they came in, and on record where they came from.
Beside it lie `model.toml`, for `base`, and the tokenizer's files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.manifest import (
    FileEntry,
    StoredRectangle,
    TensorEntry,
    make_manifest,
    to_bytes,
)
from megalite.checkpoint.names import MANIFEST
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.shard_file import DTYPES
from megalite.config import ModelConfig
from megalite.config.saved import saved_config
from megalite.config.text import model_toml
from megalite.distributed.agree import ALONE
from megalite.exchange.export import copy_tokenizer
from megalite.exchange.folder import SOURCE
from megalite.exchange.write import MAX_FILE_BYTES, Files, Item, files_of, write_folder
from megalite.run.parameters import stage_parameters, whole_model

MODEL_FILE = "model.toml"
_DEFAULT_PADDING = ModelConfig.model_fields["vocab_pad_multiple"].default


def convert(folder: Checkpoint, out: Path, max_file_bytes: int = MAX_FILE_BYTES) -> list[str]:
    """Write an opened folder as the checkpoint `out`; returns lines that say what was done.

    Raises ConfigError if `out` exists, CheckpointError if a file cannot be written.
    """
    saved = saved_config(folder.manifest.config, str(folder.path))
    model = saved.model
    items = []
    for spec in stage_parameters(model, whole_model(model)):
        name = f"param/{spec.name}"
        dtype = DTYPES[folder.manifest.tensors[name].dtype][0]

        def fill(spec: Any, data: torch.Tensor) -> None:
            piece = NamedPiece.of_shard("param", spec, 1, 0, data)
            load(folder, [piece], whole_kinds=(), vocab_size=model.vocab_size)

        items.append(Item(name, dtype, spec.shape, partial(fill, spec)))
    files = files_of(items, max_file_bytes, "weights")
    source: Any = folder.manifest.state[SOURCE]

    def finish(directory: Path, entries: Mapping[str, FileEntry]) -> list[str]:
        lines = copy_tokenizer(folder, source, directory, None)
        tokenizer = saved.data.tokenizer and str(out)
        data = saved.data.model_copy(update={"tokenizer": tokenizer})
        manifest = make_manifest(
            step=0,
            layout={},
            config=saved.model_copy(update={"data": data}).model_dump(mode="json"),
            state={SOURCE: source},
            files=dict(entries),
            tensors=_entries(files),
        )
        head = f"# {source['class']} of {folder.path}, by `megalite hf import`.\n"
        disk = Disk()
        # Written without padding, read with the default: a run's tp decides what it needs.
        padded = model.model_copy(update={"vocab_pad_multiple": _DEFAULT_PADDING})
        table = model_toml(saved.model_copy(update={"model": padded}))
        disk.write_file(directory / MODEL_FILE, (head + table).encode())
        disk.write_file(directory / MANIFEST, to_bytes(manifest))
        return lines

    lines = write_folder(out, files, finish, ALONE)
    count = sum(one.size_bytes // one.dtype.itemsize for one in items)
    tp = math.gcd(model.num_heads, model.kv_heads, model.ffn_hidden_size)
    return [
        f"wrote {out}: {source['class']}, {count:,} weights, and {MODEL_FILE}; parallel.tp may be "
        f"a divisor of {tp}",
        *lines,
    ]


def _entries(files: Files) -> dict[str, TensorEntry]:
    """The manifest's tensors: each is stored whole."""
    return {
        one.name: TensorEntry(
            shape=one.shape,
            dtype=str(one.dtype).removeprefix("torch."),
            rectangles=(
                StoredRectangle(
                    file=file, key=one.name, offsets=(0,) * len(one.shape), sizes=one.shape
                ),
            ),
        )
        for file, group in files.items()
        for one in group
    }
