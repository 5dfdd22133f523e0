"""Random schedules with random sleeps before their actions: no hang, and the same numbers."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from megalite.schedules import NAMES, Action
from megalite.schedules.catalogue import SCHEDULES
from tests.pipeline.kit import problems

pytestmark = pytest.mark.long

NUM_SCHEDULES, NUM_PARTS, LONGEST_SLEEP_S = 200, 10, 0.05
# So many actions sleep that a pass takes a second or so; where, is drawn for each rank by itself.
SLEEPS_PER_PASS = 4


def draw(seed: int, p: int) -> tuple[str, int, int]:
    """A schedule's name, chunks and microbatches."""
    rng = random.Random(f"schedule {seed}")
    name = rng.choice([*NAMES, "family", "family"])
    m = rng.randint(1, 2 * p + 1)
    if name == "family":
        f, lag = rng.choice([1, 1.25, 1.5, 2]), rng.choice([0, 0.5, 1, 2])
        group = rng.choice(["", ",fused", ",group=3" if m > 3 else ""])
        return f"family:f={f},lag={lag}{group}", rng.randint(1, 3), m
    chunks = SCHEDULES[name].chunks
    v = rng.choice([v for v in (1, 2, 3) if chunks.allows(v)])
    return name, v, max(m, 2 * p) if name == "dualpipe-v" else m


def run_disturbed(ctx: Any, p: int, seeds: range) -> list[str]:
    mesh = ctx.mesh(pp=p)
    found = []
    for seed in seeds:
        name, v, m = draw(seed, p)
        again = "again " if seed % 4 == 0 else ""
        rng = random.Random(f"sleep {seed} {ctx.rank}")
        share = SLEEPS_PER_PASS / (8 * v * m)

        def rest(_action: Action, rng: random.Random = rng, share: float = share) -> None:
            if rng.random() < share:
                time.sleep(rng.uniform(0.0, LONGEST_SLEEP_S))

        found += problems(mesh, again + name, v, m, on_action=rest)
    return found


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_schedules_with_random_sleeps(pool: Any, part: int) -> None:
    count = NUM_SCHEDULES // NUM_PARTS
    seeds = range(part * count, (part + 1) * count)
    assert pool.run(run_disturbed, 4, 4 if part % 2 else 2, seeds) == [[]] * 4
