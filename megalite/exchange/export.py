"""A checkpoint's weights as a Hugging Face folder, which transformers loads as it is.

A tensor of theirs is assembled at a time, from the stored rectangles of ours. The config has both
dialects, and what the folder that the weights came from had beside them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import BoxPiece
from megalite.checkpoint.shard_file import DTYPES
from megalite.config import ModelConfig, RunConfig
from megalite.config.saved import saved_config
from megalite.data.tokenizer import open_tokenizer
from megalite.data.tokenizer_files import (
    BESIDE,
    CONFIG_NAME,
    JSON_NAME,
    MODEL_NAME,
    read_tokenizer_files,
)
from megalite.distributed.agree import ALONE, Ranks
from megalite.errors import CheckpointError, ConfigError
from megalite.exchange.classes import IDLE, StockClass, class_for
from megalite.exchange.folder import INDEX, source_of
from megalite.exchange.megatron import MEGATRON_CORE
from megalite.exchange.tensors import Part, parts_of
from megalite.exchange.write import MAX_FILE_BYTES, Files, Item, files_of, put_json, write_folder
from megalite.run.parameters import stage_parameters, whole_model
from megalite.wording import number_of

_TOKENIZER_FILES = (
    JSON_NAME,
    MODEL_NAME,
    *BESIDE,
    "added_tokens.json",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Of the folder that the weights came from these would be untrue of the new one.
_NOT_CARRIED = ("_name_or_path", "_commit_hash", "transformers_version", "pretraining_tp")


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    weights: str = "param",
    dtype: str | None = None,
    megatron: bool = False,
    ranks: Ranks = ALONE,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Write the weights of a checkpoint as `folder`; returns lines that say what was done.

    All ranks call it. weights: "param", or "ema" for the average. dtype: None keeps each tensor's.
    megatron: under Megatron-Core's names. Raises CheckpointError, the same on all ranks, if no
    stock class can hold the model or a file cannot be written; ConfigError if the folder exists or
    there is no average.
    """
    saved = saved_config(checkpoint.manifest.config, str(checkpoint.path))
    if not any(name.startswith(f"{weights}/") for name in checkpoint.manifest.tensors):
        raise ConfigError(f"{checkpoint.path} holds no average of the weights; leave out --ema")
    row = class_for(saved.model)
    items = _items(checkpoint, saved.model, row, weights, dtype, megatron)
    files = files_of(items, max_file_bytes, "model")

    def finish(directory: Path, _: Any) -> list[str]:
        return _write_rest(checkpoint, directory, saved, row, files)

    lines = write_folder(folder, files, finish, ranks)
    size = sum(one.size_bytes for one in items)
    return [
        f"wrote {folder}: {row.name}, {number_of(len(items), 'tensor')} in "
        f"{number_of(len(files), 'file')}, {size / 2**20:,.1f} MiB",
        *_narrowed(checkpoint, items, weights),
        *lines,
    ]


def _items(
    checkpoint: Checkpoint,
    model: ModelConfig,
    row: StockClass,
    weights: str,
    dtype: str | None,
    megatron: bool,
) -> list[Item]:
    """Their tensors, in the order of the table."""
    by_name: dict[str, list[tuple[str, Part]]] = {}
    for ours, parts in _parts(model, row, megatron).items():
        for part in parts:
            by_name.setdefault(part.name, []).append((ours, part))
    specs = {spec.name: spec for spec in stage_parameters(model, whole_model(model))}

    def fill(parts: Sequence[tuple[str, Part]], data: torch.Tensor) -> None:
        pieces = []
        for ours, part in parts:
            name, spec = f"{weights}/{ours}", specs[ours]
            pieces.append(BoxPiece(name, spec.shape, part.box, part.view(data), spec.num_true_rows))
        load(checkpoint, pieces, whole_kinds=(), vocab_size=model.vocab_size)

    stored = checkpoint.manifest.tensors
    return [
        Item(
            name,
            DTYPES[dtype or stored[f"{weights}/{parts[0][0]}"].dtype][0],
            parts[0][1].shape,
            partial(fill, parts),
        )
        for name, parts in by_name.items()
    ]


def _parts(model: ModelConfig, row: StockClass, megatron: bool) -> dict[str, list[Part]]:
    found, without = parts_of(model, MEGATRON_CORE[0] if megatron else row.names)
    if without:
        raise CheckpointError(f"Megatron-Core has no names for {', '.join(without)}")
    return found


def _narrowed(checkpoint: Checkpoint, items: Sequence[Item], weights: str) -> list[str]:
    """A line if weights were rounded to a narrower type."""
    stored = {t.dtype for n, t in checkpoint.manifest.tensors.items() if n.startswith(weights)}
    written = {str(one.dtype).removeprefix("torch.") for one in items}
    return [
        f"weights are {before}, rounded to {after}"
        for before in sorted(stored)
        for after in sorted(written)
        if torch.promote_types(DTYPES[before][0], DTYPES[after][0]) != DTYPES[after][0]
    ]


# --- the files beside the weights -----------------------------------------------------------------


def _write_rest(
    checkpoint: Checkpoint,
    directory: Path,
    saved: RunConfig,
    row: StockClass,
    files: Files,
) -> list[str]:
    """Write index, config and generation config, copy the tokenizer; returns lines about them."""
    put = partial(put_json, directory)
    items = [one for group in files.values() for one in group]
    if len(files) > 1:
        total = sum(one.size_bytes for one in items)
        places = {one.name: file for file, group in files.items() for one in group}
        put(INDEX, {"metadata": {"total_size": total}, "weight_map": places})

    source = source_of(checkpoint) or {}
    lines = copy_tokenizer(checkpoint, source, directory, saved.data.tokenizer)
    config = _config(saved, row, source, items)
    put("config.json", config)
    ids = {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}
    put("generation_config.json", source.get("generation_config") or ids)
    if row.positions_key not in source.get("config", {}) and saved.model.positions == "rope":
        lines.append(
            f"{row.positions_key} = {config[row.positions_key]}: the run's sequence length"
        )
    return lines


def _config(
    saved: RunConfig, row: StockClass, source: Mapping[str, Any], items: Sequence[Item]
) -> dict[str, Any]:
    """The keys of config.json, in both dialects."""
    before = source.get("config", {})
    carried = {key: before[key] for key in _TOKEN_IDS if key in before}
    if source.get("class") == row.name:
        idle = (IDLE | row.idle | {row.positions_key}) - set(_NOT_CARRIED)
        carried |= {key: value for key, value in before.items() if key in idle}
    dtypes = {str(one.dtype).removeprefix("torch.") for one in items}
    dtype = max(dtypes, key=lambda name: DTYPES[name][0].itemsize)
    return {
        **(_ids_of(saved) if not before else {}),
        row.positions_key: saved.data.seq_length,
        **carried,
        **row.write(saved.model),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _ids_of(saved: RunConfig) -> dict[str, Any]:
    """The special ids of the run's own tokenizer; null without one, as the class has defaults."""
    path = saved.data.tokenizer
    if path is None or not Path(path).exists():
        return dict.fromkeys(_TOKEN_IDS)
    tokenizer = open_tokenizer(path)
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


def copy_tokenizer(
    checkpoint: Checkpoint, source: Mapping[str, Any], directory: Path, own: str | None
) -> list[str]:
    """Copy the tokenizer's files from where the weights came from; returns a line about it.

    own: the tokenizer that the run names, which comes first.
    """
    places = [checkpoint.path, *([Path(source["path"])] if source else [])]
    if own is not None and Path(own).exists():
        if not Path(own).is_dir():
            _write_tokenizer(Path(own), directory)
            return [f"tokenizer {own}"]
        places.insert(0, Path(own))
    for place in places:
        found = [name for name in _TOKENIZER_FILES if (place / name).is_file()]
        if found:
            for name in found:
                shutil.copyfile(place / name, directory / name)
            return [f"tokenizer of {place}: {', '.join(found)}"]
    return ["no tokenizer: the weights came without one"]


def _write_tokenizer(path: Path, directory: Path) -> None:
    """Write the files of a tokenizer that is no folder."""
    contents = read_tokenizer_files(path).contents
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    if CONFIG_NAME in contents:
        return

    # By its own model alone: a class of its own would put a space before each text.
    tokenizer = open_tokenizer(path)
    texts = {number: text for text, number in tokenizer.special_texts.items()}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    named = {f"{role}_token": texts[id_] for role, id_ in ids.items() if id_ in texts}
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
    put_json(directory, CONFIG_NAME, {**fixed, **named})
