"""All legal cases, and a small set of them in which every legal pair of settings occurs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from tests.parity.case import FAMILIES, Case

AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "sp": (False, True),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "schedule": ("gpipe", "1f1b", "interleaved"),
    "dp": (1, 2),
    "zero": (0, 1),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "kv_heads": (4, 2),
    "vocab": (97, 131),
    "mask": ("full", "ragged", "documents"),
    "clip": (0.05, None),
}
# Options that a case of the full product takes in turn; the pairwise set covers their pairs too.
TURNS: dict[str, tuple[Any, ...]] = {
    "m": (3, 1, 5, 2),
    "micro_batch": (1, 2),
    "chunk_tokens": (0, 7),
    "overlap": (True, False),
    "family": tuple(FAMILIES),
    "dropout": (False, True),
}


LAYOUT = ("tp", "sp", "pp", "vpp", "schedule", "dp", "kv_heads")
FREE = {name: values for name, values in {**AXES, **TURNS}.items() if name not in LAYOUT}


def is_legal(case: Case) -> bool:
    """What a config check would let through, in at most 8 ranks."""
    layout = case.world_size <= 8
    pipeline = {
        "gpipe": case.pp > 1 or case.vpp == 1,
        "1f1b": case.vpp == 1,
        "interleaved": case.pp > 1 and case.vpp > 1,
    }[case.schedule]
    tensor = case.tp > 1 or not case.sp
    return layout and pipeline and tensor and case.kv_heads % case.tp == 0


def legal_layouts() -> list[dict[str, Any]]:
    """Settings of `LAYOUT`: those whose legality depends on each other."""
    rows = (dict(zip(LAYOUT, v, strict=True)) for v in product(*(AXES[n] for n in LAYOUT)))
    return [row for row in rows if is_legal(Case(**row))]


def all_cases() -> Iterator[Case]:
    """The full product of `AXES`, the options of `TURNS` taken in turn."""
    turns = list(product(*TURNS.values()))
    free = [name for name in FREE if name not in TURNS]
    rows = product(legal_layouts(), product(*(FREE[name] for name in free)))
    for number, (layout, values) in enumerate(rows):
        extra = dict(zip(TURNS, turns[(number * 7) % len(turns)], strict=True))
        yield Case(**layout, **dict(zip(free, values, strict=True)), **extra)


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(settings: dict[str, Any]) -> set[Pair]:
    """Every two settings, names in order."""
    return set(combinations(sorted(settings.items()), 2))


def legal_pairs() -> set[Pair]:
    """Every two settings that occur together in some legal case."""
    layouts = legal_layouts()
    pairs = set().union(*(pairs_of(layout) for layout in layouts))
    singles = {item for layout in layouts for item in layout.items()}
    singles |= {(name, value) for name, values in FREE.items() for value in values}
    for a, b in combinations(sorted(singles, key=str), 2):
        if a[0] != b[0] and not {a[0], b[0]} <= set(LAYOUT):
            pairs.add((a, b) if a[0] < b[0] else (b, a))
    return pairs


def pairwise_cases(seed: int = 1, tries: int = 400) -> list[Case]:
    """A covering set, by greedy choice among seeded random legal cases; the same each time.

    New pairs are weighed against what a case costs: a share of its own and a share per rank.
    """

    def worth(settings: dict[str, Any]) -> float:
        return len(pairs_of(settings) & left) / (10 + Case(**settings).world_size)

    draw, layouts, left = random.Random(seed), legal_layouts(), legal_pairs()
    chosen = []
    while left:
        tried = [_random_settings(draw, layouts) for _ in range(tries)]
        best = max(tried, key=worth)
        if gain := pairs_of(best) & left:
            chosen.append(Case(**best))
            left -= gain
    return chosen


def _random_settings(draw: random.Random, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    return {**draw.choice(layouts), **{name: draw.choice(v) for name, v in FREE.items()}}
