"""The training loop of one rank: data, step, evaluation, metrics, checkpoints, signals.

Reading order: `Trainer.run`, then `_step`. What a step computes is in engine.py; what it reports in
metrics.py; what is saved in state.py. All ranks run this in lockstep; only rank 0 writes metrics.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from megalite.checks.packages import require_extras
from megalite.config import RunConfig
from megalite.config.effect import unreached
from megalite.config.text import to_toml
from megalite.data.batches import MicroBatch
from megalite.data.fingerprint import as_saved
from megalite.data.loader import Loader
from megalite.distributed import comm
from megalite.distributed.agree import together
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError, MegaliteError
from megalite.optim.lr_schedule import learning_rate
from megalite.optim.norm import NonFiniteGradientError
from megalite.optim.zero1 import StepResult
from megalite.process.signals import EXIT_SAVED_ON_SIGNAL, SignalFlag
from megalite.record import metrics, records
from megalite.record.console import Console
from megalite.record.param_stats import ParamStats
from megalite.record.run_record import run_lines, run_record, step_record
from megalite.record.sinks import Recorder
from megalite.record.step_clock import StepClock, drain_part
from megalite.record.step_lines import StepLines
from megalite.run.batch_plan import batch_plan, horizon_steps
from megalite.train import state
from megalite.train.batch import (
    count_valid_tokens,
    dropout_start,
    step_loader,
    token_batches,
)
from megalite.train.changes import Changed, as_records
from megalite.train.datasets import describe, open_data, require_same_data
from megalite.train.engine import Engine
from megalite.train.evaluate import evaluate
from megalite.train.kernel_choice import kernel_record, plain_on_gpu
from megalite.train.pipeline_trace import save_trace
from megalite.train.policies import NON_FINITE, SPIKE, LossSpikeError, Spike, SpikeGuard
from megalite.train.resume import resume
from megalite.train.weights import load_weights


@dataclass(frozen=True)
class StepEdge:
    """What the ranks agree on at the end of a step: one all-reduce."""

    loss: float  # cross entropy, with label smoothing where it is asked for
    z_loss: float
    signalled: bool
    wall_s: float  # from the last step's end to this one's; mean over ranks, as the parts are
    parts_s: dict[str, float]


class Trainer:
    """One rank's run. `config` must be resolved; `mesh` has its groups created.

    Raises ConfigError, DataError or CheckpointError before the first step when the run cannot be
    what was asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        console: Console | None = None,
        accept: frozenset[str] = frozenset(),
        flag: SignalFlag | None = None,
    ) -> None:
        together(mesh, lambda: require_extras(config))
        self.config, self.mesh = config, mesh
        self.folder = Path(config.out) / config.name
        self.console = console or Console(quiet=mesh.rank != 0)
        self.data = together(mesh, lambda: open_data(config))
        require_same_data(self.data, config, mesh)
        self.engine = Engine(config, mesh)
        self.device = metrics.describe_device(mesh.device, config)
        self.flag = flag or SignalFlag()
        self.accept = accept  # settings that may differ from a checkpoint's, see config/resume.py
        self.changed: Sequence[Changed] = ()  # what differs from the checkpoint resumed from
        self.plan = batch_plan(config)
        self.guard = SpikeGuard(config)
        self.skips: Counter[str] = Counter()  # steps without an update so far, by reason
        self.step = 0  # steps done
        self.saved_step: int | None = None
        self.metrics: Recorder | None = None
        self.lines = StepLines(config, self.device, self.total_steps)
        self.stats = ParamStats(self.engine.optimizer, mesh)
        self._lock: TextIO | None = None
        self.loader: Loader[list[MicroBatch]] | None = None
        self.clock = StepClock(mesh.ledger, drain_part(mesh.pp.size, mesh.dp.size))

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: train.steps, or as many as consume train.tokens."""
        return horizon_steps(self.config, self.plan)

    def tokens_before(self, step: int) -> int:
        """Tokens that the steps before `step` consume."""
        return self.plan.first_sample(step) * self.config.data.seq_length

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def run(self, stop_at: int | None = None) -> int:
        """Train to `train.steps` (or leave at `stop_at` as on a signal) and return an exit code."""
        try:
            with self.flag as flag:
                self._resume()
                self.lines = StepLines(self.config, self.device, self.total_steps)
                together(self.mesh, lambda: self._open_folder() if self.mesh.rank == 0 else None)
                done, total = self._progress(self.step), self._progress(self.total_steps)
                with self.console.progress(done, total):
                    finished = self._train(flag, stop_at)
                if finished:
                    return self._leave(0, "finished")
                return self._leave(EXIT_SAVED_ON_SIGNAL, flag.name or "stopped")
        except BaseException as error:
            self._fail(error)
            raise

    def _train(self, flag: SignalFlag, stop_at: int | None) -> bool:
        """Steps until the last one, a signal on any rank or `stop_at`; whether the run is finished.

        State is saved before an evaluation, which may take long. A signal cuts an evaluation short
        or leaves it out; the next attempt makes up for it.
        """
        self.clock.begin()
        leaving = self.step == stop_at
        if self.step and not leaving and not self._was_evaluated():
            leaving = not self._evaluate_if_due(flag)
        while self.step < self.total_steps and not leaving:
            signalled = self._step(flag).signalled
            done = self.step == self.total_steps
            leaving = signalled or (self.step == stop_at and not done)
            if leaving or done or self._due(self.config.checkpoint.interval):
                self._save()
            leaving = leaving or not self._evaluate_if_due(flag)
        if self.saved_step != self.step:
            self._save()
        return self.step == self.total_steps and not (leaving and self._evaluation_due())

    def _step(self, flag: SignalFlag) -> StepEdge:
        config, train, ledger, clock = self.config, self.config.train, self.mesh.ledger, self.clock
        clock.lap("other")
        ledger.step, ledger.phase = self.step + 1, "data"
        micro = self._micro_batches()
        valid = count_valid_tokens(micro, self.mesh)
        drop = dropout_start(train.seed, self.step, micro, self.mesh)
        batches = token_batches(micro, 1.0 / max(1, valid), self.mesh.device, drop)
        clock.lap("data")
        ledger.phase = "forward and backward"
        trace = self.step + 1 == config.pipeline.trace_step
        loss = self.engine.forward_backward(batches, trace=trace)
        clock.lap("compute")
        ledger.phase = "optimizer"
        lr = learning_rate(self.step, config.optimizer, self.total_steps, self.tokens_before)
        spike = self._judge(loss)
        clock.lap("optimizer")  # a judgement waits for the world as the norm does
        before = self.stats.before() if self._measures_parameters() else None
        clock.lap("other")
        result = self._update(lr, spike)
        clock.lap("optimizer")
        ledger.phase = "step edge"
        measured = {} if before is None else self.stats.after(before, result)
        edge = self._agree(loss, flag)
        self.step += 1
        if trace:
            save_trace(self.engine, self.folder, self.step)
        self._report(edge, lr=lr, valid=valid, result=result, measured=measured)
        if result.skipped:
            self._count_skip(result, spike)
        return edge

    def _micro_batches(self) -> list[MicroBatch]:
        """This rank's microbatches of the step at hand."""
        if self.loader is None:
            plan, stop = self.plan, self.total_steps
            self.loader = step_loader(self.data.train, plan, stop, self.config, self.mesh)
        return self.loader.step(self.step)

    def _judge(self, loss: torch.Tensor) -> Spike | None:
        """The spike that the step's loss is, the same on all ranks; no collective unless asked."""
        if not self.guard.active:
            return None
        total = comm.all_reduce(loss.detach().clone(), self.mesh.world)
        return self.guard.judge(float(total))

    def _update(self, lr: float, spike: Spike | None) -> StepResult:
        try:
            result = self.engine.optimizer.step(lr, hold=spike is not None)
        except NonFiniteGradientError as error:
            raise NonFiniteGradientError(f"step {self.step + 1}: {error}") from None
        if spike is not None and spike.stop:
            raise LossSpikeError(self.guard.message(self.step + 1, spike))
        return result

    def _count_skip(self, result: StepResult, spike: Spike | None) -> None:
        """Count and tell a step that left the weights alone; its data is used up all the same."""
        reason, text = NON_FINITE, "gradients are not finite"
        if spike is not None and result.num_bad_ranks == 0:
            reason, text = SPIKE, spike.text
        self.skips[reason] += 1
        if self.metrics is not None:
            skip = {"count": self.skips[reason], "loss_scale": result.loss_scale}
            self.metrics.write("skip", step=self.step, reason=reason, **skip)
            self.console.print(
                f"step {self.step}: {text}; update skipped ({self.skips[reason]} so far"
                f"{f', loss scale {result.loss_scale:g}' if reason == NON_FINITE else ''})"
            )

    def _agree(self, loss: torch.Tensor, flag: SignalFlag) -> StepEdge:
        # synchronises the device, so that its marks can be read
        mine_loss = torch.stack([loss, self.engine.z_loss]).cpu()
        times = self.clock.finish()
        numbers = [float(flag.raised), times.wall_s, *times.parts_s.values()]
        mine = torch.cat([mine_loss, torch.tensor(numbers, dtype=torch.float64)])
        total = comm.all_reduce(mine.to(self.mesh.device), self.mesh.world).tolist()
        loss_sum, z_loss, signalled, *seconds = total
        wall_s, *parts_s = (second / self.mesh.world.size for second in seconds)
        return StepEdge(
            loss_sum, z_loss, signalled > 0, wall_s, dict(zip(times.parts_s, parts_s, strict=True))
        )

    def _measures_parameters(self) -> bool:
        """Whether the step under way is one whose parameters `log` wants measured."""
        interval = self.config.log.param_stats_interval
        return interval > 0 and (self.step + 1) % interval == 0

    def _report(
        self,
        edge: StepEdge,
        lr: float,
        valid: int,
        result: StepResult,
        measured: dict[str, Any],
    ) -> None:
        """Write the step's line; a skipped step says so in a line of its own."""
        if self.metrics is None:
            return
        batch, samples = self.plan.global_batch(self.step - 1), self.plan.first_sample(self.step)
        rates = metrics.step_rates(
            batch, edge.wall_s, self.mesh.world.size, self.config, self.device
        )
        line = {
            "step": self.step,
            "loss": edge.loss,
            **({"z_loss": edge.z_loss} if self.config.train.z_loss else {}),
            "lr": lr,
            "loss_tokens": valid,
            "memory_peak_bytes": metrics.memory_peak_bytes(self.mesh.device),
            **step_record(self.config, result, rates, edge.wall_s, edge.parts_s, batch, samples),
            **measured,
        }
        self.metrics.write("step", **line)
        text = self.lines.step(line, result.skipped)
        if text is not None:
            self.console.print(text)
        self.console.advance(self._progress(self.step))

    def _progress(self, step: int) -> int:
        """What a step's end is on the way: steps, or samples where steps differ in size."""
        return step if len(self.plan.stages) == 1 else self.plan.first_sample(step)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _evaluation_due(self) -> bool:
        interval = self.config.eval.interval
        return interval > 0 and (self._due(interval) or self.step == self.total_steps)

    def _was_evaluated(self) -> bool:
        """Whether an earlier attempt wrote the losses of this step: rank 0 reads its record."""
        if not self._evaluation_due():
            return True
        mine = self.metrics is not None and self.metrics.has("eval", self.step)
        found: bool = comm.broadcast_object(mine, self.mesh.world)
        return found

    def _signalled(self, flag: SignalFlag) -> bool:
        """Whether any rank has had a signal; all ranks ask together."""
        mine = torch.tensor([float(flag.raised)], device=self.mesh.device)
        return bool(comm.all_reduce(mine, self.mesh.world, op="max")[0] > 0)

    def _evaluate_if_due(self, flag: SignalFlag) -> bool:
        """False if it was due and a signal cut it short."""
        if not self._evaluation_due():
            return True
        self.clock.stop()  # what an evaluation takes belongs to no step
        whole = self.evaluate(lambda: self._signalled(flag))
        self.clock.begin()
        return whole

    def evaluate(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Write the loss of each validation set that is due; the weights stay as they are.

        `stop` is asked between batches, on all ranks; if it says so nothing is written, and False
        is returned.
        """
        results = evaluate(self.engine, self.data.sets, self.step == self.total_steps, stop)
        if results is None:
            self.console.print(f"step {self.step:5d}: evaluation cut short; it is made up for")
            return False
        for result in results:
            if self.metrics is not None:
                self.metrics.write("eval", step=self.step, **asdict(result))
                self.console.print(
                    self.lines.evaluation(self.step, result.name, result.loss, result.tokens)
                )
        return True

    def _save(self) -> None:
        began = time.perf_counter()
        self.clock.stop()
        self.mesh.ledger.phase = "checkpoint"
        path = state.save_run(
            self.engine,
            self.checkpoints,
            self.step,
            {
                "step": self.step,
                "consumed_tokens": self.tokens_before(self.step),
                "stages": [list(stage) for stage in self.plan.before(self.step)],
                "data": as_saved(self.data.identities),
                "spikes": self.guard.state(),
                "skips": dict(self.skips),
                "kernels": kernel_record(self.engine.ops),
            },
        )
        self.saved_step = self.step
        if self.metrics is not None:
            seconds = time.perf_counter() - began
            self.metrics.write("checkpoint", step=self.step, path=str(path), seconds=seconds)
            self.console.print(f"step {self.step:5d}: saved {path} in {seconds:.1f} s")
        self.clock.begin()

    def _resume(self) -> None:
        data = as_saved(self.data.identities)
        found = resume(self.engine, self.checkpoints, data, self.accept, self.console.print)
        if found is not None:
            self.step, self.plan, self.changed = found.step, found.plan, found.changed
            self.saved_step = found.step
            self.guard.load(found.saved["spikes"])
            self.skips.update(found.saved["skips"])
        elif self.config.checkpoint.load_weights is not None:
            source = load_weights(self.engine, Path(self.config.checkpoint.load_weights))
            self.console.print(f"weights from {source.path}, everything else new")

    def _open_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = records.lock_folder(self.folder)
            (self.folder / "config.toml").write_text(to_toml(self.config), encoding="utf-8")
            self.metrics = Recorder(self.folder, self.config, self.console.print)
            self.console.open_log(self.folder / "log.txt")
        except OSError as error:
            raise ConfigError(
                f"run folder {self.folder} cannot be written: {error.strerror}; change out or name"
            ) from error
        memory = self.engine.optimizer.memory_report()
        self.metrics.write(
            "run" if self.metrics.attempt == 1 else "restart",
            step=self.step,
            **run_record(
                self.config,
                self.mesh.world.size,
                self.device,
                memory,
                kernel_record(self.engine.ops),
            ),
            **({"changed": as_records(self.changed)} if self.changed else {}),
        )
        size = self.mesh.world.size
        samples = self.plan.first_sample(self.total_steps)
        for text in [
            *run_lines(self.folder, self.config, size, self.device, memory, self.engine.ops.name),
            *plain_on_gpu(self.config, self.engine.ops, self.mesh.device, self.engine.dtype),
            *describe(self.config, self.data, samples),
            *unreached(self.config, self.total_steps),
        ]:
            self.console.print(text)

    def _leave(self, code: int, reason: str) -> int:
        self.console.print(f"{reason} at step {self.step} of {self.total_steps}")
        self._close(code, reason)
        return code

    def _fail(self, error: BaseException) -> None:
        """Note in the run folder, if it is open, why the run ends; whoever catches it tells."""
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, MegaliteError):  # a full disk must not hide the error
            if self.metrics is not None:
                self.console.record(f"failed at step {self.step}: {reason}")
            self._close(2 if isinstance(error, MegaliteError) else 1, reason)

    def _close(self, code: int, reason: str) -> None:
        self.clock.stop()
        if self.loader is not None:
            self.loader.close()
        if self.metrics is not None:
            self.metrics.write("end", step=self.step, reason=reason, exit_code=code)
            self.metrics.close(code)
            self.metrics = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self.console.close()
