"""`python -m tests.parity [--full]`: train every case and print the table of its errors."""

from __future__ import annotations

import sys
import time

from tests.parity.covering import all_cases, pairwise_cases
from tests.parity.run import assemble, compare, reference, train_rank
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64

KINDS = ("loss", "norm", "grad", "param", "exp_avg", "exp_avg_sq")


def main() -> int:
    cases = list(all_cases()) if "--full" in sys.argv[1:] else pairwise_cases()
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
