"""The loss over whole validation sets: one number per set, the same at every layout.

Each evaluation of a set is a pass from its first sample, independent of training's position, so
there is no position to save. Every sample counts once; padding of the last batch has no weight.
Sums are float64 over all ranks and divided once, by the number of tokens that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from megalite.distributed import comm
from megalite.record.run_log import RunLog
from megalite.run.batch_plan import BatchPlan, BatchStage
from megalite.train.batch import step_loader
from megalite.train.engine import Engine, Scorer
from megalite.train.position import Position
from megalite.train.run_data import EvalSet


@dataclass(frozen=True)
class EvalResult:
    """Mean loss per counted token of a set (nan without any), and the number of these tokens.

    bytes: UTF-8 bytes of text that these tokens stand for; 0 where they were not counted.
    """

    name: str
    loss: float
    tokens: int
    bytes: int = 0

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the model needs for a byte of the text; None where bytes were not counted."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


class Evaluations:
    """The evaluations of a run after the steps that `eval.interval` names, and after its last.

    With `eval.at_start` there is one before the first step.
    """

    def __init__(
        self, engine: Engine, sets: Sequence[EvalSet], position: Position, log: RunLog
    ) -> None:
        self._engine, self._sets, self._at, self._log = engine, sets, position, log

    @property
    def is_due(self) -> bool:
        """True if the step just done is evaluated, or the start if none is done."""
        settings = self._engine.config.eval
        at_step = self._at.is_due(settings.interval) if self._at.step else settings.at_start
        return settings.interval > 0 and (at_step or self._at.is_last)

    def missing(self) -> list[EvalSet]:
        """The sets that are due at this step and that no earlier attempt wrote a loss of.

        The losses that one did write are taken up. Rank 0 reads its record; all ranks call it.
        """
        if not self.is_due:
            return []
        mine = self._log.evaluations(self._at.step)
        written: dict[str, float] = comm.broadcast_object(mine, self._engine.mesh.world)
        for name, loss in written.items():
            self._rate(name, loss)
        return [each for each in self._due() if each.name not in written]

    def run(
        self, stop: Callable[[], bool] = lambda: False, sets: Sequence[EvalSet] | None = None
    ) -> bool:
        """Write the loss of each set that is due, or of `sets`; the weights stay as they are.

        `stop` is called between batches, on all ranks; if it returns True nothing is written, and
        False is returned.
        """
        results = evaluate(self._engine, self._due() if sets is None else sets, stop)
        if results is None:
            self._log.print(f"step {self._at.step:5d}: evaluation cut short; it is made up for")
            return False
        for result in results:
            self._log.evaluation(self._at.step, result.name, result.loss, result.tokens)
            self._rate(result.name, result.loss)
        return True

    def _due(self) -> list[EvalSet]:
        """The sets of this step: those with `at_end` only when the run is over."""
        return [each for each in self._sets if self._at.is_last or not each.at_end]

    def _rate(self, name: str, loss: float) -> None:
        if self._at.step:  # the start has no checkpoint that could be the best
            self._at.rate(name, loss)


def evaluate(
    engine: Scorer,
    sets: Sequence[EvalSet],
    stop: Callable[[], bool] = lambda: False,
    num_bytes: NDArray[Any] | None = None,
) -> list[EvalResult] | None:
    """Losses of sets, in order; None if `stop` ended it. All ranks call it.

    stop: called before each batch, on all ranks, and must return the same on all of them.
    num_bytes: bytes of text that each id stands for, [vocabulary], to count those of the sets.
    """
    engine.mesh.ledger.phase = "evaluation"
    results = []
    with engine.evaluation_weights():
        for each in sets:
            result = evaluate_set(engine, each, stop, num_bytes)
            if result is None:
                return None
            results.append(result)
    return results


def evaluate_set(
    engine: Scorer,
    eval_set: EvalSet,
    stop: Callable[[], bool] = lambda: False,
    num_bytes: NDArray[Any] | None = None,
) -> EvalResult | None:
    """One pass over a set, or over eval.batches of it; None if `stop` ended it."""
    config, mesh = engine.config, engine.mesh
    plan = BatchPlan((BatchStage(0, 0, config.train.global_batch),))
    steps = plan.steps_for(eval_set.batches.num_samples)
    if config.eval.batches is not None:
        steps = min(steps, config.eval.batches)

    # Losses are on the last stages; one rank of each replica counts the tokens of its samples.
    counts_tokens = mesh.tp.rank == 0 and mesh.pp.rank == 0
    bytes_V = None if num_bytes is None else torch.from_numpy(num_bytes)
    total = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    with step_loader(eval_set.batches, plan, steps, config, mesh) as reader:
        for step in range(steps):
            if stop():
                return None
            loaded = reader.step(step)
            total[0] += engine.forward_only(engine.upload.token_batches(loaded, 1.0))
            if counts_tokens:
                for batch in loaded:
                    counted = batch.labels[batch.loss_weight > 0]
                    total[1] += len(counted)
                    if bytes_V is not None:
                        total[2] += int(bytes_V[counted.clamp(max=len(bytes_V) - 1)].sum())
    loss_sum, tokens, count = comm.all_reduce(total, mesh.world).tolist()
    loss = loss_sum / tokens if tokens else math.nan
    return EvalResult(eval_set.name, loss, int(tokens), int(count))
