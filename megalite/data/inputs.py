"""The datasets that a config names, opened and held against it. Without torch.

Two callers: the command line, which reports every problem before anything is started
(train/start_checks.py), and the ranks, which train on them (train/run_data.py).
"""

from __future__ import annotations

from megalite.config import RunConfig
from megalite.config.inputs import Source
from megalite.config.shares import SPLIT_NAMES
from megalite.data.dataset import TokenDataset, TokenSpan
from megalite.data.samples import Packing
from megalite.data.sidecar import require_tokenizer
from megalite.errors import DataError


def open_dataset(path: str, config: RunConfig) -> TokenDataset:
    """A dataset; DataError if the config's tokenizer is not the one of its sidecar."""
    dataset = TokenDataset(path)
    require_own_tokenizer(dataset, config)
    return dataset


def require_own_tokenizer(dataset: TokenDataset, config: RunConfig) -> None:
    """Raise DataError if the config's tokenizer is not the one of the dataset's sidecar."""
    tokenizer = config.data.tokenizer
    if tokenizer is not None and dataset.sidecar is not None:
        require_tokenizer(dataset.sidecar, dataset.prefix, tokenizer)


def packing_of(config: RunConfig) -> Packing:
    """The way that the config cuts samples."""
    data = config.data
    return Packing(data.seq_length, data.packing == "documents", data.long_documents == "drop")


def split_source(dataset: TokenDataset, source: Source, config: RunConfig) -> dict[str, TokenSpan]:
    """The spans of a source by part; DataError, with its name, for a part without a sample.

    A part to evaluate needs a token that counts.
    """
    try:
        at_documents = config.data.split_at == "document"
        spans = dataset.split(config.data.split, packing_of(config), at_documents)
        for name, span in spans.items():
            if name != SPLIT_NAMES[0] and config.eval.interval:
                span.require_trained()
        return spans
    except DataError as error:
        if not config.data.sources:
            raise
        raise DataError(f"{source.setting} ({source.name}): {error}") from None


def whole_set(dataset: TokenDataset, name: str) -> TokenSpan:
    """The span of an evaluation set; DataError if a loss mask leaves nothing of it."""
    span = dataset.span(f"eval set {name}")
    span.require_trained()
    return span
