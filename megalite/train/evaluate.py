"""The loss over whole validation sets: one number per set, the same at every layout.

Each evaluation of a set is a pass from its first sample, independent of training's position, so
there is no position to save. Every sample counts once; padding of the last batch has no weight.
Sums are float64 over all ranks and divided once, by the number of tokens that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megalite.distributed import comm
from megalite.record.run_log import RunLog
from megalite.run.batch_plan import BatchPlan, BatchStage
from megalite.train.batch import step_loader
from megalite.train.engine import Engine
from megalite.train.position import Position
from megalite.train.run_data import EvalSet


@dataclass(frozen=True)
class EvalResult:
    """Mean loss per counted token of a set (nan without any), and the number of these tokens."""

    name: str
    loss: float
    tokens: int


class Evaluations:
    """The evaluations of a run after the steps that `eval.interval` names, and after its last."""

    def __init__(
        self, engine: Engine, sets: Sequence[EvalSet], position: Position, log: RunLog
    ) -> None:
        self._engine, self._sets, self._at, self._log = engine, sets, position, log

    @property
    def is_due(self) -> bool:
        """True if the step just done is evaluated."""
        interval = self._engine.config.eval.interval
        return interval > 0 and (self._at.is_due(interval) or self._at.is_last)

    def is_missing(self) -> bool:
        """True if the evaluation of this step is due and no earlier attempt wrote it.

        Its losses are taken up if one did. Rank 0 reads its record; all ranks call it.
        """
        if not self.is_due:
            return False
        mine = self._log.evaluations(self._at.step)
        written: dict[str, float] = comm.broadcast_object(mine, self._engine.mesh.world)
        for name, loss in written.items():
            self._at.rate(name, loss)
        return not written

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Write the loss of each set that is due; the weights stay as they are.

        `stop` is called between batches, on all ranks; if it returns True nothing is written, and
        False is returned.
        """
        results = evaluate(self._engine, self._sets, self._at.is_last, stop)
        if results is None:
            self._log.print(f"step {self._at.step:5d}: evaluation cut short; it is made up for")
            return False
        for result in results:
            self._log.evaluation(self._at.step, result.name, result.loss, result.tokens)
            self._at.rate(result.name, result.loss)
        return True


def evaluate(
    engine: Engine,
    sets: Sequence[EvalSet],
    at_end: bool,
    stop: Callable[[], bool] = lambda: False,
) -> list[EvalResult] | None:
    """Losses of the sets that are due, in order; None if `stop` ended it. All ranks call it.

    at_end: the run is over, so that sets with `at_end` are due as well. stop: called before each
    batch, on all ranks, and must return the same on all of them.
    """
    engine.mesh.ledger.phase = "evaluation"
    results = []
    with engine.evaluation_weights():
        for each in sets:
            if at_end or not each.at_end:
                result = evaluate_set(engine, each, stop)
                if result is None:
                    return None
                results.append(result)
    return results


def evaluate_set(
    engine: Engine, eval_set: EvalSet, stop: Callable[[], bool] = lambda: False
) -> EvalResult | None:
    """One pass over a set, or over eval.batches of it; None if `stop` ended it."""
    config, mesh = engine.config, engine.mesh
    plan = BatchPlan((BatchStage(0, 0, config.train.global_batch),))
    steps = plan.steps_for(eval_set.batches.num_samples)
    if config.eval.batches is not None:
        steps = min(steps, config.eval.batches)

    # Losses are on the last stages; one rank of each replica counts the tokens of its samples.
    counts_tokens = mesh.tp.rank == 0 and mesh.pp.rank == 0
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    with step_loader(eval_set.batches, plan, steps, config, mesh) as reader:
        for step in range(steps):
            if stop():
                return None
            loaded = reader.step(step)
            total[0] += engine.forward_only(engine.upload.token_batches(loaded, 1.0))
            if counts_tokens:
                total[1] += sum(int(batch.loss_weight.count_nonzero()) for batch in loaded)
    loss_sum, tokens = comm.all_reduce(total, mesh.world).tolist()
    return EvalResult(eval_set.name, loss_sum / tokens if tokens else math.nan, int(tokens))
