"""Tiny runs for the trainer's tests: data, configs, jobs for the rank pool, what a run left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.checkpoint.find import open_checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.shard_file import DTYPES
from megalite.checks import check_and_resolve
from megalite.config import RunConfig
from megalite.config.resume import accepted
from megalite.corpus.indexed_writer import IndexedWriter
from megalite.errors import MegaliteError
from megalite.layout.topology import Topology
from megalite.record.records import read_metrics
from megalite.train.loop import Trainer

VOCAB, SEQ_LENGTH, GLOBAL_BATCH = 97, 16, 4

# What differs from one process: settings by dotted name.
LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {},
    "tp2": {"parallel.tp": 2},
    "dp2": {"parallel.dp": 2},
    "dp4": {"parallel.dp": 4},
    "pp2": {"parallel.pp": 2},
    "interleaved": {"parallel.pp": 2, "parallel.vpp": 2},
    "zero1": {"parallel.dp": 2, "optimizer.zero": 1},
    "3d": {
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.pp": 2,
        "parallel.dp": 2,
        "optimizer.zero": 1,
    },
}


def write_tokens(
    prefix: Path, num_samples: int, *, seed: int = 0, document_tokens: int = 23
) -> Path:
    """A dataset that gives `num_samples` training samples, in documents of uneven lengths."""
    generator = np.random.default_rng(seed)
    left = num_samples * SEQ_LENGTH + 1
    with IndexedWriter(prefix, VOCAB) as writer:
        while left:
            length = min(left, int(generator.integers(1, 2 * document_tokens)))
            writer.add_document(generator.integers(0, VOCAB, length))
            left -= length
        writer.publish()
    return prefix


def make_config(folder: Path, name: str, layout: str = "serial", **changes: Any) -> RunConfig:
    """A resolved config; `changes` are settings with `__` for the dot. Data is `folder/data`."""
    settings: dict[str, Any] = {
        "name": name,
        "out": str(folder),
        "model.num_layers": 4,
        "model.hidden_size": 32,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.ffn_hidden_size": 48,
        "model.vocab_size": VOCAB,
        "model.vocab_pad_multiple": 4,
        "optimizer.lr": 1e-2,
        "optimizer.warmup_steps": 2,
        "optimizer.bucket_mb": 0.02,
        "optimizer.zero": 0,
        "data.path": str(folder / "data"),
        "data.seq_length": SEQ_LENGTH,
        "data.split": (1.0, 0.0),
        "train.steps": 6,
        "train.global_batch": GLOBAL_BATCH,
        "checkpoint.keep": 100,  # tests look at many of a run's checkpoints
        **LAYOUTS[layout],
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, last = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[last] = value
    return check_and_resolve(RunConfig.model_validate(tree))


def world_size(config: RunConfig) -> int:
    return Topology.of(config.parallel).world_size


def make_trainer(ctx: Any, config: RunConfig, accept: str = "") -> Trainer:
    """A trainer as a new process would make it, on the pool's mesh of the config's layout."""
    parallel = config.parallel
    mesh = ctx.mesh(tp=parallel.tp, dp=parallel.dp, pp=parallel.pp)
    return Trainer(config, mesh, accept=accepted([accept]))


@dataclass(frozen=True)
class Outcome:
    """What became of a job on one rank: an exit code or a MegaliteError, and the samples it had."""

    code: int | None
    error: str = ""
    first_step: int = 0
    sample_ids: dict[int, list[int]] = field(default_factory=dict)


def train(ctx: Any, jobs: Sequence[tuple[Any, ...]]) -> list[Outcome]:
    """Runs in a rank: one run after another, each from a new trainer: (config, stop_at, accept)."""
    return [train_one(ctx, *job) for job in jobs]


def train_one(ctx: Any, config: RunConfig, stop_at: int | None = None, accept: str = "") -> Outcome:
    seen: dict[int, list[int]] = {}
    try:
        trainer = make_trainer(ctx, config, accept)
        read = trainer._micro_batches

        def listen() -> Any:
            batches = read()
            ids = [number for batch in batches for number in batch.sample_ids.tolist()]
            seen[trainer.step] = ids
            return batches

        trainer._micro_batches = listen
        code = trainer.run(stop_at)
    except MegaliteError as error:
        return Outcome(None, f"{type(error).__name__}: {error}", sample_ids=seen)
    return Outcome(code, first_step=min(seen, default=trainer.step), sample_ids=seen)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of one kind of a run folder's metrics."""
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == kind]


def step_numbers(folder: Path) -> list[tuple[Any, ...]]:
    """What two runs that compute the same must agree on, step by step."""
    keys = ("step", "loss", "grad_norm", "lr", "consumed_tokens", "tokens", "loss_tokens")
    return [tuple(line[key] for key in keys) for line in lines(folder, "step")]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder, "step")]


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step-{step:08d}")
    whole = {
        name: torch.zeros(entry.shape, dtype=DTYPES[entry.dtype][0])
        for name, entry in checkpoint.manifest.tensors.items()
    }
    load(checkpoint, [NamedPiece.whole(name, tensor) for name, tensor in whole.items()])
    return whole


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not there twice with the same bits."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    )


def different_datasets(ctx: Any, root: str) -> str:
    """Runs in a rank: a trainer whose data lies on this rank's own disk; returns the error."""
    config = make_config(Path(root) / f"host-{ctx.rank}", "run", "dp2")
    try:
        make_trainer(ctx, config)
    except MegaliteError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
