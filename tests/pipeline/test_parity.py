"""Every schedule at every layout gives the bits of one process, on real ranks without tags."""

import random
import time
from itertools import pairwise

import pytest

from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.schedules.catalogue import SCHEDULES as NAMED_SCHEDULES
from tests.pipeline.kit import (
    BOUNDARY,
    make_schedule,
    micro_batches,
    problems,
    same,
    serial,
    stages_of,
)

# Name and chunks per rank; "split f lag" is the family with B and W apart, "again" recomputes.
SCHEDULES = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("split 1 0", 1),
    ("split 1 1", 1),
    ("split 1 1", 2),
    ("fused 2 1", 2),
    ("zb-h2", 1),
    ("zb-v", 2),
    ("v-min", 2),
    ("again zb-v", 2),
    ("again interleaved", 2),
]


def cases(p):
    return [(name, v, m) for name, v in SCHEDULES for m in sorted({1, 2, 3, 5, 2 * p + 1})]


def compare(ctx, p):
    mesh = ctx.mesh(pp=p)
    return [problem for case in cases(p) for problem in problems(mesh, *case)]


def test_one_rank():
    mesh = Mesh(Topology())
    assert [problem for case in cases(1) for problem in problems(mesh, *case)] == []
    assert not mesh.ledger.counts


@pytest.mark.long
@pytest.mark.parametrize("p", [2, 4])
def test_pipeline(pool, p):
    """p=2 runs as two replicas beside each other: the columns must not mix either."""
    assert pool.run(compare, 4, p) == [[]] * 4


def named_cases(p, every_m):
    """Every name with 1, 2 and 4 chunks where it is defined and every m up to 2p + 1; or one of
    these for each name, with its fewest chunks.
    """
    found = []
    for name, schedule in NAMED_SCHEDULES.items():
        chunks = [v for v in (1, 2, 4) if schedule.chunks.allows(v)]
        fewest = 2 * p if name == "dualpipe-v" else 1
        numbers = range(fewest, 2 * p + 2) if every_m else [max(fewest, p + 1)]
        found += [(name, v, m) for v in (chunks if every_m else chunks[:1]) for m in numbers]
    return found


def compare_named(ctx, p, every_m):
    mesh = ctx.mesh(pp=p)
    return [problem for case in named_cases(p, every_m) for problem in problems(mesh, *case)]


@pytest.mark.long
def test_every_name_on_eight_ranks(pool):
    assert pool.run(compare_named, 8, 8, False) == [[]] * 8


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 4, 8])
def test_every_name_with_every_number_of_chunks_and_microbatches(pool, p):
    assert pool.run(compare_named, p, p, True, timeout_s=1800.0) == [[]] * p


def compare_disturbed(ctx, p, seed):
    mesh = ctx.mesh(pp=p)
    order = random.Random(f"{seed} {ctx.rank}")

    def rest(_action):
        time.sleep(order.choice([0.0, 0.0, 0.001, 0.004]))

    chosen = [("gpipe", 2, 5), ("interleaved", 2, 5), ("split 1 1", 2, 6), ("1f1b", 1, 7)]
    return [
        problem for case in chosen for problem in problems(mesh, *case, num_steps=2, on_action=rest)
    ]


@pytest.mark.long
@pytest.mark.parametrize("p", [2, 4])
def test_uneven_ranks_give_the_same_bits(pool, p):
    for seed in range(2):
        assert pool.run(compare_disturbed, 4, p, seed) == [[]] * 4


def evaluate(ctx):
    """Evaluation between and after steps, with other numbers of microbatches than the schedule."""
    from megalite.pipeline import PipelineRuntime

    mesh = ctx.mesh(pp=2)
    schedule = make_schedule("interleaved", 2, 2, 3)
    stages = stages_of(mesh, schedule)
    runtime = PipelineRuntime(schedule, stages, mesh, BOUNDARY)
    right = []
    for num in (5, 3, 1, 5):
        for stage in stages:
            stage.num_tokens = num * 3
        losses = runtime.run_forward(micro_batches(num))
        expected = serial(4, num)[0] if mesh.pp.rank == 1 else []
        right.append(same(losses, expected) and not any(loss.requires_grad for loss in losses))
        right.append(not any(stage.grads.sums for stage in stages))
    return right


def test_evaluation_with_any_number_of_microbatches(pool):
    assert pool.run(evaluate, 2) == [[True] * 8] * 2


def count_traffic(ctx):
    from megalite.pipeline import PipelineRuntime

    mesh = ctx.mesh(pp=2)
    schedule = make_schedule("interleaved", 2, 2, 4)
    runtime = PipelineRuntime(schedule, stages_of(mesh, schedule), mesh, BOUNDARY)
    mesh.ledger.reset()
    runtime.run(micro_batches(4), trace=True)
    traced = [str(span.action) for span in runtime.trace]
    gaps = [b.start - a.end for a, b in pairwise(runtime.trace)]  # around the wait for a message
    ordered, waited = min(gaps) >= 0.0, 0.0 < sum(gaps) < runtime.trace[-1].end
    return (
        sum(n for (_, axis), n in mesh.ledger.bytes_sent.items() if axis == "pp"),
        traced,
        ordered and waited,
    )


def test_nothing_else_is_sent_and_the_trace_is_the_program(pool):
    from megalite.schedules import lower, post_ahead

    program = post_ahead(lower(make_schedule("interleaved", 2, 2, 4)))
    message_bytes = 3 * 4 * 8
    for rank, (sent, traced, sound) in enumerate(pool.run(count_traffic, 2)):
        assert sent == message_bytes * sum(a.kind in ("SF", "SB") for a in program.ranks[rank])
        assert traced == [str(action) for action in program.ranks[rank]]
        assert sound
