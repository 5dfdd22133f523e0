"""Opens a run's dataset, and makes sure that it is what the config asks for, on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from megalite.config import RunConfig
from megalite.data.dataset import Batches, TokenDataset
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError, DataError
from megalite.train.agreement import all_equal

# Validation scores a fair sample of its split, the same one whatever the run's own seed.
_VALIDATION_SEED = 0


def require_same_data(fingerprint: str, config: RunConfig, mesh: Mesh) -> None:
    """DataError on every rank unless all ranks opened the same dataset (a disk of one's own)."""
    if not all_equal(fingerprint, mesh):
        raise DataError(
            f"ranks see different datasets at data.path={config.data.path} (here the fingerprint "
            f"is {fingerprint[:15]}...); put it on a file system that all nodes share, or copy it "
            "again to every node"
        )


def require_its_tokenizer(dataset: TokenDataset, config: RunConfig) -> None:
    """DataError if data.tokenizer is not the one that made the dataset, where that is known."""
    path = config.data.tokenizer
    if path is None or dataset.sidecar is None:
        return
    made_by = dataset.sidecar.tokenizer
    found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    if found != made_by.sha256:
        raise DataError(
            f"data.tokenizer={path} (sha256 {found[:12]}...) did not make data.path="
            f"{config.data.path}, which {made_by.file} did (sha256 {made_by.sha256[:12]}...); "
            f"set data.tokenizer to that one"
        )


def open_batches(config: RunConfig) -> tuple[Batches, Batches | None]:
    """Train and validation batches of a config's dataset, ids checked against the model's."""
    data = config.data
    if data.path is None:
        raise ConfigError("data.path is not set; give the prefix that `megalite data` wrote")
    dataset = TokenDataset(data.path)
    dataset.check_vocab(config.model.vocab_size)
    require_its_tokenizer(dataset, config)
    train, valid = dataset.split(data.split, data.seq_length)
    if train is None:
        raise DataError(f"data.split={data.split} leaves no training data; raise its first share")
    make: Callable[..., Batches] = Batches
    options = {"document_masks": data.document_masks, "vocab_size": config.model.vocab_size}
    train_batches = make(train, data.seq_length, config.train.seed, **options)
    if not config.eval.interval:
        return train_batches, None
    if valid is None:
        raise DataError(
            f"eval.interval={config.eval.interval}, but data.split={data.split} leaves no "
            "validation data; raise its second share or set eval.interval=0"
        )
    valid_batches = make(valid, data.seq_length, _VALIDATION_SEED, **options)
    if valid_batches.num_steps(config.train.global_batch) < 1:
        raise DataError(
            f"validation has {valid_batches.num_samples} samples of {data.seq_length} tokens, "
            f"fewer than train.global_batch={config.train.global_batch}; raise the second share of "
            f"data.split={data.split}, or set eval.interval=0"
        )
    return train_batches, valid_batches
