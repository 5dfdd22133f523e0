"""A Hugging Face folder opened as a checkpoint: its tensors are the places of ours in its files.

Everything is checked against config.json here, all problems at once, before a tensor is read. The
folder holds safetensors alone; pickles and code in it are never run. Without torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.find import Checkpoint, find_checkpoint
from megalite.checkpoint.manifest import (
    DTYPE_CODES,
    FileEntry,
    Manifest,
    StoredRectangle,
    TensorEntry,
    make_manifest,
    manifest_hash,
)
from megalite.checks import check_and_resolve
from megalite.config import ModelConfig, RunConfig
from megalite.data.tokenizer_files import JSON_NAME, MODEL_NAME
from megalite.distributed.agree import ALONE, Ranks, on_all_ranks
from megalite.errors import CheckpointError, ConfigError
from megalite.exchange.classes import StockClass, read_model, weights_config
from megalite.exchange.megatron import MEGATRON_CORE
from megalite.exchange.tensors import Names, Part, parts_of
from megalite.wording import number_of

HF = "hf:"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SOURCE = "source"  # in a checkpoint's state: the folder that its weights came from
_FLOATS = {code: name for name, code in DTYPE_CODES.items() if "float" in name}
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
_CHUNK_BYTES = 1 << 22
_MAX_NAMED = 8


class StockRectangle(StoredRectangle):
    """A rectangle of ours in a tensor of theirs."""

    part: Part

    @property
    def key_shape(self) -> tuple[int, ...]:
        return self.part.shape

    def view(self, stored: Any) -> Any:
        return self.part.view(stored)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file: its type, shape, and bytes [start, stop) of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Folder:
    """A checked folder: its class, the model, and our tensors as parts of stored ones.

    `keys`: the stored name of a part's tensor. `config`: of weights alone, with the tokens that the
    tokenizer has beyond the vocabulary.
    """

    path: Path
    entries: Mapping[str, Any]
    row: StockClass
    model: ModelConfig
    tensors: Mapping[str, list[Part]]
    stored: Mapping[str, StoredTensor]
    keys: Mapping[str, str]
    config: RunConfig
    notes: tuple[str, ...]


def hf_folder(named: str) -> Path | None:
    """The folder that `hf:PATH` names; None for what has no such prefix."""
    return Path(named.removeprefix(HF)).expanduser() if named.startswith(HF) else None


def open_weights(named: str, ranks: Ranks = ALONE, step: int | None = None) -> Checkpoint:
    """The checkpoint that a path leads to, as `find_checkpoint`, or the folder that `hf:` names."""
    folder = hf_folder(named)
    if folder is None:
        return find_checkpoint(Path(named), ranks, step=step)
    if step is not None:
        raise ConfigError(f"step {step} has no effect on {named}, which has one set of weights")
    return open_folder(folder, ranks)


def source_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The folder that a checkpoint's weights came from, on record in it: see `_manifest`."""
    state: Any = checkpoint.manifest.state
    found = state.get(SOURCE) or (state.get("trainer") or {}).get("weights_from") or {}
    return found.get(SOURCE, found) if "config" in found.get(SOURCE, found) else None


def identity(checkpoint: Checkpoint) -> str:
    """A hash that names the content of a checkpoint, or of a folder that is read as one."""
    own = manifest_hash(checkpoint.path)
    if own:
        return own
    source: Any = checkpoint.manifest.state[SOURCE]
    return hashlib.sha256(json.dumps(source["sha256"], sort_keys=True).encode()).hexdigest()


def open_folder(
    path: Path, ranks: Ranks = ALONE, ignore: frozenset[str] = frozenset()
) -> Checkpoint:
    """A folder of a stock class as a checkpoint of weights ("param"). All ranks call it.

    Its files are hashed once, shared over the ranks; the manifest's state has their sha256 and the
    folder's own settings under `SOURCE`. ignore: names of tensors and of keys of config.json that
    may be left out. Raises CheckpointError, the same on all ranks, with every problem.
    """

    def check() -> Folder:
        return read_folder(path, ignore)

    doing = f"reading {path.name}"
    folder = on_all_ranks(ranks, check, doing)
    names = sorted({one.file for one in folder.stored.values()})

    def hash_mine() -> dict[str, dict[str, Any]]:
        mine = [*names, "config.json"][ranks.rank :: ranks.size]
        return {name: _file_entry(path / name) for name in mine}

    gathered = ranks.gather(on_all_ranks(ranks, hash_mine, doing))
    files = ranks.broadcast({name: one for found in gathered for name, one in found.items()})
    return Checkpoint(path, _manifest(folder, files), notes=folder.notes)


def read_folder(path: Path, ignore: frozenset[str] = frozenset()) -> Folder:
    """Read and check a folder's description; raises CheckpointError with every problem."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give one with config.json and {WEIGHTS}")
    stored = _stored_tensors(path)
    entries = _json_object(path / "config.json")
    row, model = read_model(entries, ignore)
    _config(path, model, entries, row)
    names, keys = _naming(row, model, stored)
    tensors, without = parts_of(model, names)
    assert not without, f"{row.name} has no names for {without}"
    problems = list(_misfits(row, model, names, tensors, stored, keys, ignore, path))
    if problems:
        raise CheckpointError("\n".join(problems))
    tensors = {
        ours: [replace(part, shape=stored[keys[part.name]].shape) for part in parts]
        for ours, parts in tensors.items()
    }
    vocab_size = max(model.vocab_size, _num_tokens(path))
    config = _config(path, model.model_copy(update={"vocab_size": vocab_size}), entries, row)
    notes = []
    if vocab_size > model.vocab_size:
        notes.append(
            f"the tokenizer has {number_of(vocab_size, 'token')}, config.json "
            f"vocab_size={model.vocab_size}: "
            f"embedding and head grow, new rows are the mean of the others"
        )
    return Folder(path, entries, row, model, tensors, stored, keys, config, tuple(notes))


# --- config.json ----------------------------------------------------------------------------------


def positions_of(entries: Mapping[str, Any], row: StockClass) -> int:
    """The longest sequence that a config.json names, at least 1."""
    found = entries.get(row.positions_key)
    return found if isinstance(found, int) and found > 0 else 1024


def _config(
    path: Path, model: ModelConfig, entries: Mapping[str, Any], row: StockClass
) -> RunConfig:
    """The config of the folder's weights. Raises CheckpointError if its sizes do not fit."""
    has_tokenizer = any((path / name).is_file() for name in (JSON_NAME, MODEL_NAME))
    text = str(path) if has_tokenizer else None
    try:
        return check_and_resolve(weights_config(model, positions_of(entries, row), text))
    except ConfigError as error:
        raise CheckpointError("\n".join(f"config.json: {one}" for one in error.problems)) from None


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        hint = ""
        if (path.parent / "adapter_config.json").is_file():
            hint = "; this is an adapter: merge it into its model first (peft: merge_and_unload)"
        raise CheckpointError(f"{path} cannot be read: {error}{hint}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def _num_tokens(path: Path) -> int:
    """One more than the highest token id that the folder's tokenizer files name; 0 without any."""
    ids: list[Any] = []
    if (path / "added_tokens.json").is_file():
        ids += _json_object(path / "added_tokens.json").values()
    if (path / "tokenizer_config.json").is_file():
        added = _json_object(path / "tokenizer_config.json").get("added_tokens_decoder")
        ids += [int(key) for key in added if key.isdigit()] if isinstance(added, dict) else []
    if (path / "tokenizer.json").is_file():
        added = _json_object(path / "tokenizer.json").get("added_tokens")
        ids += [one.get("id") for one in added or [] if isinstance(one, dict)]
    return max((one + 1 for one in ids if isinstance(one, int)), default=0)


# --- safetensors files ----------------------------------------------------------------------------


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors in a folder's files, by name, from the files' headers."""
    if (path / WEIGHTS).is_file():
        return dict(_header(path, WEIGHTS))
    if not (path / INDEX).is_file():
        raise CheckpointError(_no_weights(path))
    index = _json_object(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{path / INDEX} holds no weight_map of names")

    # A name must not lead out of the folder.
    files = sorted(set(index.values()))
    problems = [
        f"{path / INDEX}: {file!r} is no plain name" if Path(file).name != file else
        f"{path / file} is missing, which {INDEX} names"
        for file in files
        if Path(file).name != file or not (path / file).is_file()
    ]  # fmt: skip
    if problems:
        raise CheckpointError("\n".join(problems))
    found = {name: one for file in files for name, one in _header(path, file)}
    wrong = [name for name, file in index.items() if name not in found or found[name].file != file]
    if wrong:
        raise CheckpointError(f"{path / INDEX}: not where it says: {_listed(wrong)}")
    return found


def _no_weights(path: Path) -> str:
    """The error for a folder without safetensors: by what is there instead."""
    there = sorted(one.name for one in path.iterdir())
    pickles = [name for name in there if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if any(name.endswith(".distcp") or name == "common.pt" for name in there):
        return (
            f"{path} is a torch_dist checkpoint, whose metadata are pickles: convert it to a "
            "Hugging Face folder with Megatron-LM's or Megatron Bridge's own export first"
        )
    if pickles:
        return (
            f"{path} holds {_listed(pickles)}: pickles can run code and are not read; convert a "
            "folder that you trust with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
        )
    return f"{path} holds neither {WEIGHTS} nor {INDEX}"


def _header(path: Path, file: str) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of one file. Raises CheckpointError if its header is not sound."""
    try:
        with (path / file).open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {number_of(size, 'byte')}")
            entries = json.loads(stream.read(size))
        base, length = 8 + size, (path / file).stat().st_size
        stop_of_all = base
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            start, stop = (base + offset for offset in entry["data_offsets"])
            stop_of_all = max(stop_of_all, stop)
            yield name, StoredTensor(file, entry["dtype"], tuple(entry["shape"]), start, stop)
        if stop_of_all != length:
            raise ValueError(f"it has {number_of(length, 'byte')}, its header says {stop_of_all}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / file} is not a sound safetensors file: {error}") from error


# --- tensors --------------------------------------------------------------------------------------


def _naming(
    row: StockClass, model: ModelConfig, stored: Mapping[str, StoredTensor]
) -> tuple[Names, dict[str, str]]:
    """The table whose names the folder uses, and the stored name of each of them."""
    best: tuple[int, Names, dict[str, str]] | None = None
    for names, cut in (
        (row.names, ""),
        (row.names, row.names.base),
        *((n, "") for n in MEGATRON_CORE),
    ):
        tensors, without = parts_of(model, names)
        if without:
            continue
        wanted = {part.name for parts in tensors.values() for part in parts}
        keys = {name: name.removeprefix(cut) for name in wanted}
        num_found = sum(key in stored for key in keys.values())
        if best is None or num_found > best[0]:
            best = (num_found, names, keys)
    assert best is not None, f"{row.name} has no names for its own model"
    return best[1], best[2]


def _misfits(
    row: StockClass,
    model: ModelConfig,
    names: Names,
    tensors: Mapping[str, list[Part]],
    stored: Mapping[str, StoredTensor],
    keys: Mapping[str, str],
    ignore: frozenset[str],
    path: Path,
) -> Iterator[str]:
    """Tensors that are missing, left over, or of another shape or type than the config says."""
    missing = [key for key in keys.values() if key not in stored]
    if missing:
        yield f"{path} lacks tensors of {row.name} by its config.json: {_listed(sorted(missing))}"

    known, patterns = set(keys.values()), [re.compile(one) for one in names.ignored]
    head = f"{names.outside['head']}.weight"
    for name in sorted(stored.keys() - known - ignore):
        if model.tie_embeddings and name == head:
            yield from _tied_problem(
                path, stored, name, keys[f"{names.outside['embedding']}.weight"]
            )
        elif not any(pattern.fullmatch(name) for pattern in patterns):
            yield (
                f"{name} {list(stored[name].shape)} has no place in {row.name} by config.json; if "
                f"it changes nothing, add --ignore {name}"
            )

    for ours, parts in tensors.items():
        found = [(part, stored[keys[part.name]]) for part in parts if keys[part.name] in stored]
        for part, one in found:
            # Where a vocabulary is padded, the file alone knows by how many rows.
            least = (
                part.shape if not part.padded else (max(part.stop, *one.shape[:1]), *part.shape[1:])
            )
            if one.shape != least:
                yield (
                    f"{keys[part.name]} is {list(one.shape)}, by config.json it needs to be "
                    f"{list(part.shape)}"
                )
            if one.dtype not in _FLOATS:
                yield (
                    f"{keys[part.name]} is stored as {one.dtype}; weights need to be one of "
                    f"{', '.join(_FLOATS)} (a quantised model needs to be dequantised first)"
                )
        if len({one.dtype for _, one in found}) > 1:
            kinds = ", ".join(f"{keys[part.name]} {one.dtype}" for part, one in found)
            yield f"{ours} is one tensor here, its parts have several types: {kinds}"


def _tied_problem(
    path: Path, stored: Mapping[str, StoredTensor], head: str, embedding: str
) -> Iterator[str]:
    """A line if the head of tied embeddings is there and is another than the embedding."""
    one, other = stored[head], stored.get(embedding)
    is_same = other is not None and (one.dtype, one.shape) == (other.dtype, other.shape)
    if not is_same or _hash_of(path, one) != _hash_of(path, stored[embedding]):
        yield (
            f"{head} differs from {embedding}, but tie_word_embeddings is true; set it to false in "
            f"config.json, or add --ignore {head} to use the embedding for both"
        )


def _hash_of(path: Path, one: StoredTensor) -> str:
    digest, left = hashlib.sha256(), one.stop - one.start
    with (path / one.file).open("rb") as stream:
        stream.seek(one.start)
        while left > 0 and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


# --- manifest -------------------------------------------------------------------------------------


def _file_entry(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size_bytes": path.stat().st_size, "sha256": digest}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _manifest(folder: Folder, files: Mapping[str, dict[str, Any]]) -> Manifest:
    generation = folder.path / "generation_config.json"
    source = {
        "path": str(folder.path),
        "class": folder.row.name,
        "config": dict(folder.entries),
        "generation_config": _json_object(generation) if generation.is_file() else None,
        "sha256": {name: entry["sha256"] for name, entry in files.items()},
    }
    return make_manifest(
        step=0,
        layout={},
        config=folder.config.model_dump(mode="json"),
        state={SOURCE: source},
        files={name: FileEntry(**entry) for name, entry in files.items() if name != "config.json"},
        tensors={f"param/{name}": _entry(folder, name) for name in folder.tensors},
    )


def _entry(folder: Folder, name: str) -> TensorEntry:
    rectangles = []
    for part in folder.tensors[name]:
        stored = folder.stored[folder.keys[part.name]]
        place = {"offsets": part.box.offsets, "sizes": part.box.sizes}
        key = folder.keys[part.name]
        rectangles.append(StockRectangle(file=stored.file, key=key, part=part, **place))
    stops = [part.box.stops for part in folder.tensors[name]]
    shape = tuple(max(stop[dim] for stop in stops) for dim in range(len(stops[0])))
    return TensorEntry(shape=shape, dtype=_FLOATS[stored.dtype], rectangles=tuple(rectangles))
