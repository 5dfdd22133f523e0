"""The inputs of a run: its sources and evaluation sets by name, and checks of their settings.

Looks at settings, and in `missing_inputs` at which files exist; reads none of them.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from megalite.config.schema import DataConfig, EvalConfig, RunConfig
from megalite.config.shares import MAX_PARTS, SPLIT_NAMES, blend_parts, decimal_fraction
from megalite.wording import number_of

NO_DATA = (
    "neither data.path nor data.sources is set; give the prefix of a dataset, or make one with "
    "`megalite data prepare SOURCE --out PREFIX`"
)


@dataclass(frozen=True)
class Source:
    """One source of the training data; `setting` is the key that names it in the config.

    A source is identified by its name: its path may change between runs.
    """

    name: str
    path: str
    weight: Fraction
    setting: str


def sources(data: DataConfig) -> list[Source]:
    """The blend that data.sources describes, or data.path as the only source; else []."""
    if data.path is not None:
        return [Source("data", data.path, Fraction(1), "data.path")]
    return [
        Source(
            source.name or Path(source.path).name,
            source.path,
            decimal_fraction(source.weight),
            f"data.sources[{number}]",
        )
        for number, source in enumerate(data.sources)
    ]


def split_set_names(data: DataConfig, split_name: str) -> list[str]:
    """Names of the sets that one part of data.split gives: one per source, none for a share of 0.

    `split_name` is one of `SPLIT_NAMES`.
    """
    shares = dict(zip(SPLIT_NAMES, data.split, strict=False))
    if not shares.get(split_name):
        return []
    if not data.sources:
        return [split_name]
    return [f"{split_name}/{source.name}" for source in sources(data)]


def data_problems(config: RunConfig) -> Iterator[str]:
    """Settings of data and eval that do not fit each other, one line each."""
    data = config.data
    if data.path is not None and data.sources:
        yield (
            f"data.path={data.path} and data.sources both say what to train on; keep one "
            "(a single source needs no weight)"
        )
        return
    if any(word.partition("=")[0] == "--out" for word in data.prepare):
        yield "data.prepare names --out, which is data.path; take it out"
    if data.packing == "documents" and not data.document_masks:
        yield (
            "data.packing=documents puts documents that do not follow from each other into one "
            "sample, so that tokens would attend to others; set data.document_masks=true"
        )
    found = sources(data)
    yield from _repeated("data.sources", [source.name for source in found])
    if data.weights == "given":
        yield from _weights(found)
    elif found and not any(source.weight for source in found):
        yield "data.sources: weight=0 in all of them leaves nothing to train on; raise one"
    yield from _evaluation(data, config.eval)
    yield from _best(config)


def dataset_paths(config: RunConfig) -> list[tuple[str, str]]:
    """The setting and the prefix of every dataset that a run reads."""
    # A blend names its files in entries; a single data.path is a setting itself.
    blend = [
        (s.setting if config.data.path else f"{s.setting}.path", s.path)
        for s in sources(config.data)
    ]
    return [*blend, *((f"eval.sets[{n}].path", s.path) for n, s in enumerate(config.eval.sets))]


def prepare_words(config: RunConfig) -> list[str]:
    """Words of `megalite data prepare` that make data.path; [] if it is there or none are set."""
    data = config.data
    if data.path is None or not data.prepare or not _missing_files(data.path):
        return []
    return [*data.prepare, "--out", data.path]


def missing_inputs(config: RunConfig, *, prepared: bool = False) -> list[str]:
    """One line for each input that the config names and that does not exist.

    Relative paths are seen from the working folder. `prepared`: what `prepare_words` will make is
    not missing, nor a tokenizer, which may come with it.
    """
    words = prepare_words(config)
    problems = []
    for setting, prefix in dataset_paths(config):
        own = setting == "data.path" and bool(words)
        if (missing := _missing_files(prefix)) and not (own and prepared):
            made = shlex.join(words) if own else f"SOURCE --out {prefix}"
            problems.append(
                f"{setting}={prefix}: no file {' nor '.join(missing)} below {Path.cwd()}; correct "
                f"the prefix, or make it with `megalite data prepare {made}`"
            )
    tokenizer = config.data.tokenizer
    if tokenizer is not None and not Path(tokenizer).exists() and not (words and prepared):
        problems.append(
            f"data.tokenizer={tokenizer}: no such file or folder; "
            f"correct the path, or make it with `megalite data prepare SOURCE --vocab-size N`"
        )
    return problems


def _missing_files(prefix: str) -> list[str]:
    """Files of a dataset that are not there."""
    files = [f"{prefix}{suffix}" for suffix in (".bin", ".idx")]
    return [name for name in files if not Path(name).is_file()]


def _weights(found: list[Source]) -> Iterator[str]:
    """A line if no source has a weight, and one for each weight that is rounded to nothing."""
    total = sum(source.weight for source in found)
    if not total:
        if found:
            yield (
                f"data.sources: weight=0 in all {len(found)} of them leaves nothing to train on; "
                "give at least one a positive weight"
            )
        return
    for source, part in zip(found, blend_parts([s.weight for s in found]), strict=True):
        if source.weight and not part:
            least = (total - source.weight) / (MAX_PARTS - 500)  # above the bound when printed
            yield (
                f"{source.setting}.weight={float(source.weight):g} ({source.name}) is "
                f"{float(source.weight / total):.2g} of all weights, which is rounded to 0: shares "
                f"are kept to 1/{MAX_PARTS} of the whole; use weight={float(least):.3g} or more, "
                "or 0 to leave the source out"
            )


def _evaluation(data: DataConfig, evaluation: EvalConfig) -> Iterator[str]:
    from_split = [n for part in SPLIT_NAMES[1:] for n in split_set_names(data, part)]
    names = [*from_split, *(entry.name for entry in evaluation.sets)]
    yield from _repeated("eval.sets", names)
    if evaluation.interval and not names:
        yield (
            f"eval.interval={evaluation.interval} needs validation tokens, but data.split gives 0; "
            "use for example data.split=[0.98, 0.02], a set in eval.sets, or eval.interval=0"
        )


def _best(config: RunConfig) -> Iterator[str]:
    """A line if the set by which the best checkpoint is kept is not evaluated during the run."""
    name = config.checkpoint.keep_best
    sets = [*split_set_names(config.data, SPLIT_NAMES[1]), *(s.name for s in config.eval.sets)]
    if name is not None and config.eval.interval and name not in sets:
        yield (
            f"checkpoint.keep_best={name} is not evaluated during the run; use "
            f"{' or '.join(sets) or 'a set of eval.sets'}"
        )


def _repeated(setting: str, names: list[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield (
                f"{setting}: {number_of(count, 'entry')} are called {name!r}, by which their "
                "losses would be "
                f"told apart; give each a name of its own (name = ...)"
            )
