"""Opens what a run reads, and makes sure that it is what the config asks for, on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from megalite.config import RunConfig
from megalite.config.inputs import Source, sources, split_set_names
from megalite.config.shares import SPLIT_NAMES
from megalite.data.batches import Batches
from megalite.data.dataset import TokenDataset, TokenSpan
from megalite.data.fingerprint import Identity, identify
from megalite.data.sidecar import require_tokenizer
from megalite.distributed.agree import all_equal
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError, DataError

# A part of a validation set is a fair sample of it, the same one whatever the run's own seed.
_VALIDATION_SEED = 0


@dataclass(frozen=True)
class EvalSet:
    """Samples that are only evaluated; `at_end`: once, when the run is over."""

    name: str
    batches: Batches
    at_end: bool = False


@dataclass(frozen=True)
class RunData:
    """What a run trains on, what it is evaluated on, and what all of that is, by name."""

    train: Batches
    sets: tuple[EvalSet, ...]
    identities: Mapping[str, Identity]

    @property
    def digest(self) -> str:
        """One hex name for the content of all of it."""
        content = [f"{name} {known.fingerprint}" for name, known in self.identities.items()]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


def open_data(config: RunConfig) -> RunData:
    """Open every source and evaluation set of a config; ids are checked against the model's.

    Raises ConfigError or DataError that names the source, or the part of data.split, at fault.
    """
    data = config.data
    blend = sources(data)
    if not blend:
        raise ConfigError("data.path is not set; give the prefix that `megalite data` wrote")
    open_dataset = cache(lambda path: _open(path, config))
    make = _batches(config)
    spans = [_split(open_dataset(source.path), source, config) for source in blend]
    train = make(
        [span["train"] for span in spans],
        config.train.seed,
        weights=[source.weight for source in blend],
    )
    sets: list[EvalSet] = []
    for part in SPLIT_NAMES[1:] if config.eval.interval else ():
        for name, span in zip(split_set_names(data, part), spans, strict=False):
            passes = make(span[part], _VALIDATION_SEED, once=True)
            sets.append(EvalSet(name, passes, at_end=part == "test"))
    for entry in config.eval.sets:
        whole = open_dataset(entry.path).span(f"eval set {entry.name}")
        sets.append(EvalSet(entry.name, make(whole, _VALIDATION_SEED, once=True)))
    named = [(source.name, source.path) for source in blend]
    named += [(f"eval/{entry.name}", entry.path) for entry in config.eval.sets]
    return RunData(
        train,
        tuple(sets),
        {name: identify(open_dataset(path).indexed) for name, path in named},
    )


def describe(config: RunConfig, data: RunData, samples: int) -> list[str]:
    """A line for each source of a run over `samples` samples: how often it is seen."""
    lines = []
    taken = data.train.blend.counts(samples)
    for source, span, count in zip(sources(config.data), data.train.spans, taken, strict=True):
        own = span.num_samples(config.data.seq_length)
        epochs = f" = {count / own:.3g} epochs" if own else ""
        lines.append(
            f"data {source.name}: {span.num_tokens} tokens = {own} samples to train on; "
            f"this run takes {count}{epochs}"
        )
    for each in data.sets:
        when = " at the end" if each.at_end else ""
        count = each.batches.num_samples
        lines.append(f"evaluation {each.name}{when}: {count} sample{'s' if count > 1 else ''}")
    return lines


def require_same_data(data: RunData, config: RunConfig, mesh: Mesh) -> None:
    """DataError on every rank unless all ranks opened the same data (a disk of one's own)."""
    if not all_equal(data.digest, mesh):
        paths = ", ".join(f"{source.setting}={source.path}" for source in sources(config.data))
        raise DataError(
            f"ranks see different datasets at {paths} (here the fingerprint "
            f"is {data.digest[:15]}...); put them on a file system that all nodes share, or copy "
            "them again to every node"
        )


def _open(path: str, config: RunConfig) -> TokenDataset:
    dataset, tokenizer = TokenDataset(path), config.data.tokenizer
    if tokenizer is not None and dataset.sidecar is not None:
        require_tokenizer(dataset.sidecar, dataset.prefix, tokenizer)
    return dataset


def _split(dataset: TokenDataset, source: Source, config: RunConfig) -> dict[str, TokenSpan]:
    """A source's spans by part; each part of a share above 0 holds a sample."""
    try:
        return dataset.split(config.data.split, config.data.seq_length)
    except DataError as error:
        if not config.data.sources:
            raise
        raise DataError(f"{source.setting} ({source.name}): {error}") from None


def _batches(config: RunConfig) -> Callable[..., Batches]:
    """Makes Batches with the config's settings, from spans whose ids fit the model."""
    vocab_size = config.model.vocab_size
    known = cache(lambda dataset: dataset.check_vocab(vocab_size).how in ("dtype", "scan"))

    def make(
        spans: TokenSpan | list[TokenSpan],
        seed: int,
        weights: list[Fraction] | None = None,
        once: bool = False,
    ) -> Batches:
        listed = [spans] if isinstance(spans, TokenSpan) else spans
        checked = [known(span.data) for span in listed]
        return Batches(
            listed,
            config.data.seq_length,
            seed,
            weights=[Fraction(1)] if weights is None else weights,
            once=once,
            document_masks=config.data.document_masks,
            vocab_size=None if all(checked) else vocab_size,
        )

    return make
