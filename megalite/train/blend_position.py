"""The position of a run in each source of its blend, as a checkpoint keeps it.

A blend that is changed at a resume begins anew at that sample, and each source goes on behind the
samples that were taken from it, in its own shuffle. A source is known by its name, and under a new
name by the content of its dataset; one that is left out stays on record, for a later resume. So the
order is a function of data, seed, weights and this record.

Content, train.seed or data.split that change with permission give each source another shuffle, or
other samples, and it goes on at the same number in them; for a start from the first sample, give
the source another name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megalite.config import RunConfig
from megalite.config.inputs import sources
from megalite.config.meaning import same_meaning
from megalite.config.shares import apportion, blend_is_exact
from megalite.data.blend import Blend


class SourcePosition(NamedTuple):
    """The samples of a source `before` the blend in force, and `taken` up to a checkpoint."""

    shuffle: int  # the number of its shuffle in the run (data.batches.source_seed)
    fingerprint: str
    before: int = 0
    taken: int = 0


@dataclass(frozen=True)
class BlendPosition:
    """The run's sample at which the blend in force began, and its sources by name.

    Sources of earlier blends come behind those in force, which have the order of the config.
    """

    first_sample: int
    sources: Mapping[str, SourcePosition]

    @classmethod
    def new(cls, fingerprints: Mapping[str, str]) -> BlendPosition:
        """The position of a new run with these sources."""
        found = enumerate(fingerprints.items())
        return cls(0, {name: SourcePosition(number, known) for number, (name, known) in found})

    def state(self, counts: Sequence[int]) -> dict[str, Any]:
        """The position as a checkpoint keeps it, with the samples taken of the blend's sources."""
        kept = {name: source._asdict() for name, source in self.sources.items()}
        for source, count in zip(kept.values(), counts, strict=False):
            source["taken"] = count
        return {"first_sample": self.first_sample, "sources": kept}


def resumed_position(
    saved: dict[str, Any], old: RunConfig, new: RunConfig, data: dict[str, Any], sample: int
) -> tuple[BlendPosition, bool]:
    """The position of a run that goes on from a checkpoint at `sample`; data: the identities now.

    False with it: the checkpoint is of a version whose order this one does not have, since it did
    not round weights; each source goes on behind its share of the samples, give or take one.
    """
    found, exact = _saved_position(saved, old, sample)
    fingerprints = {source.name: data[source.name]["fingerprint"] for source in sources(new.data)}
    same = all(same_meaning(old, new, name) for name in ("data.sources", "data.weights"))
    if new.data.weights == "size":  # which follow from the content
        before = {name: source.fingerprint for name, source in found.sources.items()}
        same = same and all(before.get(name) == now for name, now in fingerprints.items())
    if exact and same:
        known = {
            name: source._replace(fingerprint=fingerprints.get(name, source.fingerprint))
            for name, source in found.sources.items()
        }
        return BlendPosition(found.first_sample, known), True
    return BlendPosition(sample, _begin_anew(found.sources, fingerprints)), exact


def _saved_position(
    saved: dict[str, Any], old: RunConfig, sample: int
) -> tuple[BlendPosition, bool]:
    """The position in a checkpoint, or as versions that did not keep it computed it."""
    if "blend" in saved:
        kept = saved["blend"]
        known = {name: SourcePosition(**source) for name, source in kept["sources"].items()}
        return BlendPosition(kept["first_sample"], known), True
    found = sources(old.data)
    weights = [source.weight for source in found]
    exact = blend_is_exact(weights)
    counts = Blend(weights).counts(sample) if exact else apportion(weights, sample)
    before = {
        source.name: SourcePosition(
            number, saved["data"][source.name]["fingerprint"], taken=counts[number]
        )
        for number, source in enumerate(found)
    }
    return BlendPosition(0, before), exact


def _begin_anew(
    past: Mapping[str, SourcePosition], fingerprints: Mapping[str, str]
) -> dict[str, SourcePosition]:
    """The sources of a new blend, each behind its past, and then those left out."""
    left = {name: source._replace(before=source.taken) for name, source in past.items()}
    shuffles = max((source.shuffle for source in past.values()), default=-1) + 1
    named = {name: left.pop(name) for name in fingerprints if name in left}

    begun = {}
    for name, fingerprint in fingerprints.items():
        source = named.get(name)
        if source is None:
            same = [other for other, known in left.items() if known.fingerprint == fingerprint]
            source = left.pop(same[0]) if same else SourcePosition(shuffles, fingerprint)
            shuffles += not same
        begun[name] = source._replace(fingerprint=fingerprint)
    return begun | left
