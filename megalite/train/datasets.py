"""Opens a run's dataset, and makes sure that it is what the config asks for, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megalite.config import RunConfig
from megalite.data.dataset import Batches, TokenDataset
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError, DataError


def require_same_data(fingerprint: str, config: RunConfig, mesh: Mesh) -> None:
    """DataError on every rank unless all ranks opened the same dataset (a disk of one's own)."""
    mine = int(fingerprint[:15], 16)  # 60 bits
    ends = torch.tensor([mine, -mine], dtype=torch.int64, device=mesh.device)
    comm.all_reduce(ends, mesh.world, op="max")
    highest, lowest = int(ends[0]), -int(ends[1])
    if highest != lowest:
        raise DataError(
            f"ranks see different datasets at data.path={config.data.path} (here the fingerprint "
            f"is {fingerprint[:15]}...); put it on a file system that all nodes share, or copy it "
            "again to every node"
        )


def open_batches(config: RunConfig) -> tuple[Batches, Batches | None]:
    """Train and validation batches of a config's dataset, ids checked against the model's."""
    data = config.data
    if data.path is None:
        raise ConfigError("data.path is not set; give the prefix that `megalite data` wrote")
    dataset = TokenDataset(data.path)
    dataset.check_vocab(config.model.vocab_size)
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
    valid_batches = make(valid, data.seq_length, config.train.seed, **options)
    if valid_batches.num_steps(config.train.global_batch) < 1:
        raise DataError(
            f"validation has {valid_batches.num_samples} samples of {data.seq_length} tokens, "
            f"fewer than train.global_batch={config.train.global_batch}; raise the second share of "
            f"data.split={data.split}, or set eval.interval=0"
        )
    return train_batches, valid_batches
