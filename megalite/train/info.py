"""The description of a path that is a run, a checkpoint or a dataset, as plain values.

A run without steps yet, or with damaged lines or checkpoints, is described as it is. Changes
nothing. Reading order: `describe`, then one function for each kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.find import Checkpoint, find_checkpoint, open_checkpoint
from megalite.checkpoint.names import (
    MANIFEST,
    checkpoints_of,
    folder_of,
    is_checkpoint,
    list_steps,
)
from megalite.config.saved import saved_config
from megalite.errors import CheckpointError, DataError
from megalite.exchange.folder import SOURCE, source_of
from megalite.record.records import read_lines
from megalite.train.origin import RECORD

_METRICS = "metrics.jsonl"


def describe(path: Path, verify: bool = True) -> dict[str, Any]:
    """A description with `kind` "run", "checkpoint" or "dataset".

    `verify`: hash every file of the checkpoints; otherwise only their sizes are compared. Raises
    DataError for a path that is none of the three, and CheckpointError or DataError for a damaged
    checkpoint or dataset.
    """
    if (path / _METRICS).is_file() or list_steps(checkpoints_of(path)):
        return {"kind": "run", **_run(path, verify)}
    if is_checkpoint(path) or list_steps(folder_of(path)):
        found = find_checkpoint(path, verify="sha256" if verify else "size")
        return {"kind": "checkpoint", **_checkpoint(found, verify)}
    prefix = _prefix(path)
    if prefix is not None:
        return {"kind": "dataset", **_dataset(prefix)}
    state = "is none of these" if path.exists() else "does not exist"
    raise DataError(
        f"{path} {state}: give a run folder (with {_METRICS}), a checkpoint (with {MANIFEST}) or "
        "the PREFIX of a dataset (PREFIX.bin and PREFIX.idx)"
    )


def _prefix(path: Path) -> str | None:
    """The prefix of a dataset, from the prefix or one of its files; None without an index."""
    plain = str(path.with_suffix("")) if path.suffix in (".bin", ".idx") else str(path)
    return plain if Path(f"{plain}.idx").is_file() else None


def _run(path: Path, verify: bool) -> dict[str, Any]:
    # A run that was resumed has several starts and maybe ends: the last ones count.
    lines = read_lines(path / _METRICS)
    kinds = [line["kind"] for line in lines.sound]
    starts = [line for line in lines.sound if line["kind"] in ("run", "restart")]
    steps = [line for line in lines.sound if line["kind"] == "step"]
    found = [_listed(step, verify) for _, step in list_steps(checkpoints_of(path))]
    head = starts[-1] if starts else {}
    last = steps[-1] if steps else {}
    has_ended = kinds[-1:] == ["end"]

    return {
        "path": str(path),
        **_config_facts(head.get("config") or {}),
        "parameters": head.get("parameters"),
        "hardware": head.get("hardware"),
        "versions": head.get("versions"),
        "git_commit": head.get("git_commit"),
        "kernels": head.get("kernels"),
        "attempts": max((line.get("attempt", 1) for line in lines.sound), default=0),
        "step": last.get("step", head.get("step")),
        "loss": last.get("loss"),
        "consumed_tokens": last.get("consumed_tokens"),
        "evaluations": _last_evaluations(lines.sound),
        "skipped_steps": kinds.count("skip"),
        "end": lines.sound[-1].get("reason") if has_ended else None,
        "checkpoints": found,
        "damage": lines.damage(),
    }


def _last_evaluations(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The last loss of each validation set, by name."""
    evals = (line for line in lines if line["kind"] == "eval")
    return {str(line.get("name", "validation")): line["loss"] for line in evals}


def _listed(path: Path, verify: bool) -> dict[str, Any]:
    """A checkpoint of a run in a few facts; a damaged one with its problem."""
    try:
        found = open_checkpoint(path, verify="sha256" if verify else "size")
    except CheckpointError as error:
        return {"name": path.name, "bytes": None, "sound": False, "problem": str(error)}
    size = sum(entry.size_bytes for entry in found.manifest.files.values())
    return {"name": path.name, "bytes": size, "sound": True, "problem": None}


def _checkpoint(found: Checkpoint, verify: bool) -> dict[str, Any]:
    manifest, path = found.manifest, found.path
    config = saved_config(manifest.config, str(path)).model_dump(mode="json")
    weights = [t for name, t in manifest.tensors.items() if name.startswith("param/")]
    trainer = manifest.state.get("trainer")
    return {
        "path": str(path),
        "step": manifest.step,
        **_config_facts(config),
        "saved_at": manifest.layout,
        "stored_weights": sum(_numel(tensor.shape) for tensor in weights),
        "weight_dtypes": sorted({tensor.dtype for tensor in weights}),
        "states": sorted({name.split("/", 1)[0] for name in manifest.tensors}),
        "tensors": len(manifest.tensors),
        "files": len(manifest.files),
        "bytes": sum(entry.size_bytes for entry in manifest.files.values()),
        "versions": manifest.versions,
        "kernels": trainer.get("kernels") if isinstance(trainer, dict) else None,
        "consumed_tokens": trainer.get("consumed_tokens") if isinstance(trainer, dict) else None,
        "weights_from": trainer.get(RECORD) if isinstance(trainer, dict) else _converted(found),
        "verified": "sha256" if verify else "size",
    }


def _converted(found: Checkpoint) -> dict[str, Any] | None:
    """The folder that weights which no run made were converted from, as a run has its origin."""
    folder = source_of(found)
    return folder and {"path": folder["path"], "checkpoint": folder["class"], SOURCE: folder}


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _config_facts(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that identify a run, from its resolved config; None for those it lacks."""
    model, parallel, optimizer, train = (
        config.get(name) or {} for name in ("model", "parallel", "optimizer", "train")
    )
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size")
    return {
        "name": config.get("name"),
        "model": {name: model.get(name) for name in ("family", *sizes, "vocab_size")},
        "layout": {name: parallel.get(name) for name in ("tp", "pp", "vpp", "dp")},
        "schedule": (config.get("pipeline") or {}).get("schedule"),
        "optimizer": {name: optimizer.get(name) for name in ("name", "zero")},
        "dtype": train.get("dtype"),
        "total_steps": train.get("steps"),
        "global_batch": train.get("global_batch"),
        "seq_length": (config.get("data") or {}).get("seq_length"),
    }


def _dataset(prefix: str) -> dict[str, Any]:
    from megalite.data.inspection import inspect_dataset

    found = inspect_dataset(prefix, num_shown=0)
    sidecar = found.sidecar
    return {
        "path": prefix,
        "tokens": found.num_tokens,
        "documents": found.num_documents,
        "sequences": found.num_sequences,
        "dtype": found.dtype,
        "bytes": Path(f"{prefix}.bin").stat().st_size,
        "vocab_size": sidecar.vocab_size if sidecar else None,
        "tokenizer": found.tokenizer or (sidecar.tokenizer.file if sidecar else None),
        "source": sidecar.source.description if sidecar else None,
        "sound": found.good,
        "problems": [f"{check.name}: {check.detail}" for check in found.checks if not check.good],
    }
