"""`python -m tests.parity [--full] [--first N]`: train cases, print the table of their errors."""

from __future__ import annotations

import argparse
import sys
import time

from tests.parity.covering import all_cases, pairwise_cases
from tests.parity.run import assemble, compare, reference, train_rank
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64

KINDS = ("loss", "norm", "grad", "param", "exp_avg", "exp_avg_sq")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full product: hours")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N cases")
    options = parser.parse_args()
    cases = (list(all_cases()) if options.full else pairwise_cases())[: options.first]
    pool = RankPool(max_world_size=8)
    print(f"{'ranks':>5}  " + "  ".join(f"{kind:>10}" for kind in KINDS) + "  case")
    worst, began = 0.0, time.monotonic()
    for case in cases:
        want = reference(case.reference(), case.num_layers)
        results = pool.run(train_rank, case.world_size, case, case.num_layers)
        errors = compare(assemble(results), want)
        worst = max(worst, *errors.values())
        row = "  ".join(f"{errors[kind]:10.1e}" for kind in KINDS)
        print(f"{case.world_size:5d}  {row}  {case}", flush=True)
    pool.close()
    seconds = time.monotonic() - began
    print(f"{len(cases)} cases in {seconds:.0f} s, worst relative error {worst:.1e}", end="")
    print(f" (bar: {PARITY_FLOAT64:.0e})")
    return 0 if worst <= PARITY_FLOAT64 else 1


if __name__ == "__main__":
    sys.exit(main())
