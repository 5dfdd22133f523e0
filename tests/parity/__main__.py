"""`python -m tests.parity [--full] [--first N] [--page FILE]`: train cases, print their errors."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.parity.case import Case
from tests.parity.covering import all_cases, pairwise_cases
from tests.parity.run import assemble, compare, reference, train_rank
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64

KINDS = ("loss", "norm", "grad", "param", "exp_avg", "exp_avg_sq")

PAGE = """\
# Parity: every layout against one process

The same seed gives the same training at every layout. This table shows how nearly.

`python -m tests.parity --page docs/parity.md` made it, in about two minutes on two cores. It trains
a tiny model for three steps in float64, at a set of layouts in which every legal pair of options
occurs. Loss, norm, every gradient, every weight and both moments are compared with one process.
The bar is {bar:.0e} relative, and replicas must be equal bit for bit.

* Layouts: tp 1 to 4, sequence parallelism, pp 1 to 4 with 1 or 2 chunks, dp 1 or 2, ZeRO-0 and 1.
* Models: six families, tied embeddings or not, grouped queries, vocabularies of 97 and 131.
* Steps: schedules, recomputation, dropout, ragged and document masks, clipping, microbatches,
  chunked loss, overlap of collectives.

Every schedule, the zero-bubble ones too, is compared likewise in `tests/parity/test_schedules.py`.

Settings that a case does not name are those of one process with three microbatches, clipping at
0.05, four key/value heads, Llama without dropout, vocabulary 97 and overlap.

In float32 two layouts differ in the last digits, as sums are taken in another order. Expect about
1e-6 relative in the loss of a first step, with or without dropout, and 1e-2 in bfloat16.

Worst of all {count} cases: {worst:.1e} relative.

| ranks | loss | norm | gradients | weights | moments | case |
|--:|--:|--:|--:|--:|--:|---|
{rows}
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full product: hours")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N cases")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table as a page, too")
    options = parser.parse_args()
    cases = (list(all_cases()) if options.full else pairwise_cases())[: options.first]
    pool = RankPool(max_world_size=8)
    print(f"{'ranks':>5}  " + "  ".join(f"{kind:>10}" for kind in KINDS) + "  case")
    found: list[tuple[Case, dict[str, float]]] = []
    began = time.monotonic()
    for case in cases:
        want = reference(case.reference(), case.num_layers)
        results = pool.run(train_rank, case.world_size, case, case.num_layers)
        errors = compare(assemble(results), want)
        found.append((case, errors))
        row = "  ".join(f"{errors[kind]:10.1e}" for kind in KINDS)
        print(f"{case.world_size:5d}  {row}  {case}", flush=True)
    pool.close()
    seconds = time.monotonic() - began
    worst = max(max(errors.values()) for _, errors in found)
    if options.page is not None:
        options.page.write_text(page(found, worst), encoding="utf-8")
    print(f"{len(cases)} cases in {seconds:.0f} s, worst relative error {worst:.1e}", end="")
    print(f" (bar: {PARITY_FLOAT64:.0e})")
    return 0 if worst <= PARITY_FLOAT64 else 1


def page(found: list[tuple[Case, dict[str, float]]], worst: float) -> str:
    """The table in markdown, with what it means."""
    rows = []
    for case, errors in found:
        moments = max(errors["exp_avg"], errors["exp_avg_sq"])
        shown = [errors["loss"], errors["norm"], errors["grad"], errors["param"], moments]
        cells = [str(case.world_size), *(f"{error:.1e}" for error in shown), str(case)]
        rows.append(f"| {' | '.join(cells)} |")
    return PAGE.format(bar=PARITY_FLOAT64, count=len(found), worst=worst, rows="\n".join(rows))


if __name__ == "__main__":
    sys.exit(main())
