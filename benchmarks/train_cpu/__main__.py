"""Training on CPU: megalite at several layouts against a plain transformers loop, same shapes.

    python -m benchmarks.train_cpu [--rounds N] [--only serial,tp2] [--profile serial]

Every contender lives in processes of its own, one thread each. Steps are interleaved: transformers,
contender, transformers, contender, ...; figures are formed within a round and are medians over the
rounds, because the machine's speed drifts. Appends JSON lines and prints a table; README.md says
how to read both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.circumstances import append_row, circumstances
from benchmarks.lanes import Lane
from benchmarks.products import Products, ProductTimes
from benchmarks.profile_kinds import Profile
from benchmarks.train_cpu.rows import LEGEND, Rounds, row_of, setting, table
from benchmarks.train_cpu.setup import GLOBAL_BATCH, LAYOUTS, MODEL, SEQ_LENGTH, Layout
from benchmarks.train_cpu.workers import MegaliteWorker, StepTime, TransformersWorker
from megalite.layout.topology import Topology

REFERENCE = "transformers"
REFERENCE_MICRO_BATCHES = (GLOBAL_BATCH, 4, 2, 1)
MICRO_BATCHES = (4, 2, 1)
_RESULTS = Path(__file__).resolve().parents[1] / "results" / "train_cpu.jsonl"


def main() -> None:
    options = parse(sys.argv[1:])
    if options.profile:
        print_profile(options.profile, options.micro_batch or MICRO_BATCHES[0])
        return
    rows = []
    for rounds in measure(options):
        row = {**circumstances("train_cpu", options.date), **setting(), **row_of(rounds)}
        append_row(options.output, row)
        rows.append(row)
    print(table(rows))
    print(LEGEND)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds per layout")
    parser.add_argument("--probe-steps", type=int, default=2, help="steps per micro batch tried")
    parser.add_argument("--only", type=layouts, default=list(LAYOUTS.values()), metavar="NAMES")
    parser.add_argument("--micro-batch", type=int, help="of megalite; default: the best")
    parser.add_argument("--reference-micro-batch", type=int, help="of transformers")
    parser.add_argument("--profile", choices=[REFERENCE, *LAYOUTS], help="profile one step, stop")
    parser.add_argument("--date", help="written into the rows")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="JSON lines are added here")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.probe_steps < 1:
        parser.error("--rounds and --probe-steps must be at least 1")
    return options


def layouts(text: str) -> list[Layout]:
    """Layouts by name, comma-separated."""
    unknown = [name for name in text.split(",") if name not in LAYOUTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no layout {', '.join(unknown)}; there are {', '.join(LAYOUTS)}"
        )
    return [LAYOUTS[name] for name in text.split(",")]


def open_lane(name: str, micro_batch: int) -> Lane:
    """The lane of transformers or of a megalite layout."""
    label = f"{name} micro_batch={micro_batch}"
    if name == REFERENCE:
        return Lane(label, Topology(), TransformersWorker, (micro_batch,))
    layout = LAYOUTS[name]
    return Lane(label, layout.topology, MegaliteWorker, (layout, micro_batch))


def measure(options: argparse.Namespace) -> Iterator[Rounds]:
    """Every layout asked for as it is done, then transformers, each at its best micro batch."""
    tries = given_or(options.reference_micro_batch, REFERENCE_MICRO_BATCHES)
    mine = given_or(options.micro_batch, MICRO_BATCHES)
    reference = Rounds(REFERENCE, best_micro_batch(REFERENCE, tries, options.probe_steps))
    with (
        open_lane(REFERENCE, reference.micro_batch) as reference_lane,
        Lane("products", Topology(), Products, (MODEL, SEQ_LENGTH)) as products,
    ):
        reference_lane.call("step")
        for layout in options.only:
            micro_batch = best_micro_batch(layout.name, mine, options.probe_steps)
            rounds = Rounds(layout.name, micro_batch, layout.topology.world_size)
            with open_lane(layout.name, micro_batch) as lane:
                interleave(reference, reference_lane, rounds, lane, products, options.rounds)
            yield rounds
        reference.memory = reference_lane.call("memory")
    yield reference


def given_or(value: int | None, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    """The one value given on the command line, or all to try."""
    return otherwise if value is None else (value,)


def best_micro_batch(name: str, tries: Sequence[int], num_steps: int) -> int:
    """The micro batch with the shortest step, tried in turns after a warm-up step each."""
    if len(tries) == 1:
        return tries[0]
    with ExitStack() as stack:
        lanes = {size: stack.enter_context(open_lane(name, size)) for size in tries}
        for lane in lanes.values():
            lane.call("step")
        turns = [
            {size: step(lane).seconds for size, lane in lanes.items()} for _ in range(num_steps)
        ]
    shortest = {size: min(turn[size] for turn in turns) for size in tries}
    best = min(tries, key=shortest.__getitem__)
    tried = ", ".join(f"{size}: {seconds:.2f} s" for size, seconds in shortest.items())
    say(f"{name}: micro batch {best} (step by micro batch: {tried})")
    return best


def interleave(
    reference: Rounds,
    reference_lane: Lane,
    rounds: Rounds,
    lane: Lane,
    products: Lane,
    num_rounds: int,
) -> None:
    """Rounds of reference, products, contender, and a reference at the end; fills both records."""
    lane.call("step")
    before = step(reference_lane).seconds
    for index in range(num_rounds):
        reference_products = products_at(products, reference)
        own_products = products_at(products, rounds)
        own, after = step(lane), step(reference_lane)
        rounds.add(own, own_products, fmean((before, after.seconds)))
        reference.add(after, reference_products, after.seconds)
        say(
            f"{rounds.name} round {index + 1}: {own.seconds:.2f} s, {after.seconds:.2f} s "
            f"{REFERENCE}"
        )
        before = after.seconds
    rounds.memory = lane.call("memory")


def products_at(products: Lane, rounds: Rounds) -> ProductTimes:
    """Times of the products at a contender's micro batch."""
    times: ProductTimes = products.call("measure", rounds.micro_tokens)[0]
    return times


def step(lane: Lane) -> StepTime:
    """One step of a contender: seconds of its slowest rank, processor time and loss of all."""
    times: list[StepTime] = lane.call("step")
    return StepTime(
        max(time.seconds for time in times),
        sum(time.cpu_s for time in times),
        sum(time.loss for time in times),
    )


def print_profile(name: str, micro_batch: int) -> None:
    """Profile one step of rank 0 after two others."""
    with open_lane(name, micro_batch) as lane:
        lane.call("step")
        plain_s = step(lane).seconds
        profiles: list[Any] = lane.call("profile")
    profile: Profile = profiles[0]
    print(profile.table)
    print(
        f"{name}, micro batch {micro_batch}, rank 0: {profile.step_s:.3f} s under the profiler, "
        f"{plain_s:.3f} s without it"
    )
    for kind, seconds in sorted(profile.seconds.items(), key=lambda item: -item[1]):
        print(f"{kind:>22}  {seconds:7.3f} s  {seconds / profile.step_s:6.1%}")


def say(line: str) -> None:
    """Progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
