"""The datasets of a run: opened, checked against the config, and compared over the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial

from megalite.config import RunConfig
from megalite.config.inputs import NO_DATA, sources, split_set_names
from megalite.config.shares import SPLIT_NAMES
from megalite.data.batches import Batches
from megalite.data.dataset import TokenDataset, TokenSpan
from megalite.data.fingerprint import Identity
from megalite.data.inputs import open_dataset, packing_of, split_source, whole_set
from megalite.distributed.equality import all_equal
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError, DataError
from megalite.wording import number_of

# Evaluation sets are shuffled, so that a part of one (eval.batches) is a fair sample; the same part
# for every train.seed.
_EVALUATION_SEED = 0


@dataclass(frozen=True)
class EvalSet:
    """A named set of samples to evaluate; `at_end`: only once, when the run is over."""

    name: str
    batches: Batches
    at_end: bool = False


@dataclass(frozen=True)
class RunData:
    """Training data, evaluation sets, and the identities of their datasets by name."""

    train: Batches
    sets: tuple[EvalSet, ...]
    identities: Mapping[str, Identity]

    @property
    def digest(self) -> str:
        """One hash, in hex, of the content of all datasets."""
        content = [f"{name} {known.fingerprint}" for name, known in self.identities.items()]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


def open_data(config: RunConfig) -> RunData:
    """Open every source and evaluation set of a config; ids are checked against the model's.

    Raises ConfigError or DataError that names the source, or the part of data.split, at fault.
    """
    data = config.data
    blend = sources(data)
    if not blend:
        raise ConfigError(NO_DATA)

    # Cached, because several sources or sets may name one dataset, whose check reads much of it.
    opened = cache(partial(open_dataset, config=config))
    ids_are_known = cache(partial(_check_ids, vocab_size=config.model.vocab_size))
    make = partial(_batches, config, ids_are_known)
    splits = [split_source(opened(source.path), source, config) for source in blend]
    weights = [source.weight for source in blend]
    if data.weights == "size":
        counts = (split["train"].num_samples(packing_of(config)) for split in splits)
        weights = [weight * count for weight, count in zip(weights, counts, strict=True)]
    train = make([split["train"] for split in splits], config.train.seed, weights)

    # Sets from the splits of the sources, if any are evaluated, then those with datasets of their
    # own. Each is one pass.
    sets: list[EvalSet] = []
    for part in SPLIT_NAMES[1:] if config.eval.interval else ():
        for name, split in zip(split_set_names(data, part), splits, strict=False):
            batches = make([split[part]], _EVALUATION_SEED, once=True)
            sets.append(EvalSet(name, batches, at_end=part == "test"))
    sets += _named_sets(config, opened, make)

    named = [(source.name, source.path) for source in blend]
    named += [(f"eval/{entry.name}", entry.path) for entry in config.eval.sets]
    identities = {name: opened(path).identity() for name, path in named}
    return RunData(train, tuple(sets), identities)


def open_named_sets(config: RunConfig) -> list[EvalSet]:
    """The sets of `eval.sets` alone; raises DataError that names the one at fault."""
    ids_are_known = cache(partial(_check_ids, vocab_size=config.model.vocab_size))
    opened = cache(partial(open_dataset, config=config))
    return _named_sets(config, opened, partial(_batches, config, ids_are_known))


def _named_sets(
    config: RunConfig,
    opened: Callable[[str], TokenDataset],
    make: Callable[..., Batches],
) -> list[EvalSet]:
    """One set for each entry of `eval.sets`: a pass over the whole dataset."""
    sets = []
    for entry in config.eval.sets:
        whole = whole_set(opened(entry.path), entry.name)
        sets.append(EvalSet(entry.name, make([whole], _EVALUATION_SEED, once=True)))
    return sets


def describe_data(
    config: RunConfig, data: RunData, taken: Sequence[int], at_end: Sequence[int]
) -> list[str]:
    """Lines about a run's data: one a source, one an evaluation set.

    taken, at_end: samples of each source that were taken before, and will be at the run's end.
    """
    lines = []
    spans, cuts = data.train.spans, data.train.samples
    for source, span, samples, before, end in zip(
        sources(config.data), spans, cuts, taken, at_end, strict=True
    ):
        own = samples.num_samples
        epochs = f" = {(end - before) / own:.3g} epochs" if own else ""
        lines.append(
            f"data {source.name}: {number_of(span.num_tokens, 'token')} = "
            f"{number_of(own, 'sample')} to train on; "
            + (f"{before} taken before, " if before else "")
            + f"this run takes {end - before}{epochs}"
        )
        lines += [f"data {source.name}: {note}" for note in samples.notes()]
    for each in data.sets:
        when = " at the end" if each.at_end else ""
        count = each.batches.num_samples
        lines.append(f"evaluation {each.name}{when}: {number_of(count, 'sample')}")
    return lines


def require_same_data(data: RunData, config: RunConfig, mesh: Mesh) -> None:
    """Raise DataError on every rank unless all ranks opened the same data.

    They may differ where each node has a disk of its own.
    """
    if not all_equal(data.digest, mesh):
        paths = ", ".join(f"{source.setting}={source.path}" for source in sources(config.data))
        raise DataError(
            f"ranks see different datasets at {paths} (here the fingerprint "
            f"is {data.digest[:15]}...); put them on a file system that all nodes share, or copy "
            "them again to every node"
        )


def _check_ids(dataset: TokenDataset, vocab_size: int) -> bool:
    """True if all ids of a dataset are known to fit the model; DataError if one does not.

    False if only a sample of them, or the sidecar, was looked at.
    """
    return dataset.check_vocab(vocab_size).how in ("dtype", "scan")


def _batches(
    config: RunConfig,
    ids_are_known: Callable[[TokenDataset], bool],
    spans: list[TokenSpan],
    seed: int,
    weights: Sequence[Fraction] = (Fraction(1),),
    once: bool = False,
) -> Batches:
    """Batches of `spans` with the config's settings; ids that are not known are checked again."""
    known = [ids_are_known(span.data) for span in spans]
    return Batches(
        spans,
        packing_of(config),
        seed,
        weights=weights,
        once=once,
        document_masks=config.data.document_masks,
        eod_mask_loss=config.data.eod_mask_loss,
        vocab_size=None if all(known) else config.model.vocab_size,
    )
