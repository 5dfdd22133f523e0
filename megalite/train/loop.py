"""The training loop of one rank. Read this first; every line below runs on all ranks in lockstep.

    run     lock the run folder, go on from the newest checkpoint, open the record, train, leave
    _train  steps, saves and evaluations until the last step, a signal or `stop_at`
    _step   data -> forward and backward -> verdict on the loss -> update -> agreement -> report
    _agree  one all-reduce at the step's end, after which all ranks have the same loss and signals

A rank computes its share of the model for its replica's share of the batch. Where one rank could
leave while another waits for it (a signal, a spike, an evaluation cut short), the ranks agree
first. engine.py computes a step, position.py has the state of the run that a checkpoint keeps, and
record/run_log.py writes the record, on rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megalite.checkpoint.names import checkpoints_of
from megalite.checks.packages import require_extras
from megalite.config import RunConfig
from megalite.config.effect import unreached
from megalite.data.batches import MicroBatch
from megalite.data.fingerprint import as_saved
from megalite.data.loader import Loader
from megalite.distributed import comm
from megalite.distributed.agree import Ranks, on_all_ranks
from megalite.distributed.mesh import Mesh
from megalite.errors import EXIT_SAVED, exit_code
from megalite.optim.distributed_optimizer import StepResult
from megalite.optim.lr_schedule import learning_rate
from megalite.optim.norm import NonFiniteGradientError
from megalite.planner.storage import storage_line
from megalite.process.signals import SignalFlag
from megalite.record.console import Console
from megalite.record.metrics import describe_device, memory_peak_bytes
from megalite.record.param_stats import ParamStats
from megalite.record.run_log import RunLog
from megalite.record.run_record import StepEdge, run_lines, run_record, step_record
from megalite.record.step_clock import StepClock, drain_part
from megalite.record.step_lines import has_line
from megalite.train import state
from megalite.train.batch import count_valid_tokens, dropout_start, step_loader
from megalite.train.changes import as_records
from megalite.train.engine import Engine
from megalite.train.evaluate import Evaluations
from megalite.train.kernel_choice import kernel_record, plain_on_gpu
from megalite.train.origin import origin_record
from megalite.train.pipeline_trace import save_trace
from megalite.train.policies import NON_FINITE, SPIKE, LossSpikeError, Spike
from megalite.train.position import Position
from megalite.train.resume import resume
from megalite.train.retention import Retention
from megalite.train.run_data import EvalSet, describe_data, open_data, require_same_data
from megalite.train.run_tokenizer import RECORD as TOKENIZER
from megalite.train.run_tokenizer import keep_tokenizer, tokenizer_files, tokenizer_record
from megalite.train.weights import load_weights


class Trainer:
    """One rank's run. `config` must be resolved; `mesh` has its groups created.

    accept: settings that may differ from those of the checkpoint to resume from. Raises
    ConfigError, DataError or CheckpointError before the first step if the run cannot start with
    these settings.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        console: Console | None = None,
        accept: frozenset[str] = frozenset(),
        flag: SignalFlag | None = None,
    ) -> None:
        ranks = Ranks(mesh.world)
        on_all_ranks(ranks, lambda: require_extras(config))

        self.config, self.mesh, self.accept = config, mesh, accept
        self.flag = flag or SignalFlag()
        self.folder = config.folder
        self.checkpoints = checkpoints_of(self.folder)
        self.device = describe_device(mesh.device, config)
        self.console = console or Console(quiet=mesh.rank != 0)
        self.log = RunLog(self.folder, config, self.device, self.console)

        # Data first: a missing file is found in a moment, the engine's memory takes a while.
        self.data = on_all_ranks(ranks, lambda: open_data(config))
        require_same_data(self.data, config, mesh)
        self.engine = Engine(config, mesh)
        self.at = Position(config, self.data)
        self.evaluations = Evaluations(self.engine, self.data.sets, self.at, self.log)
        self.stats = ParamStats(self.engine.optimizer, mesh, config.log.param_stats_interval)
        drain = drain_part(mesh.pp.size, mesh.dp.size)
        self.clock = StepClock(mesh.ledger, drain, self._is_measured)
        self.loader: Loader[list[MicroBatch]] | None = None
        self.tokenizer = tokenizer_files(config)
        self.retention = Retention(config, self.log)
        self._saved_at_s = time.monotonic()

    @property
    def step(self) -> int:
        """Steps done."""
        return self.at.step

    def run(self, stop_at: int | None = None) -> int:
        """Train to `train.steps` (or leave at `stop_at` as on a signal) and return an exit code."""
        try:
            with self.flag as flag:
                # First: what another run saves after the newest checkpoint is found would be lost.
                on_all_ranks(Ranks(self.mesh.world), self._lock)
                self._resume()
                # Only rank 0 writes, but no rank may train on where the folder cannot be written.
                on_all_ranks(Ranks(self.mesh.world), self._open_log)
                with self.console.progress(self.at.progress(self.step), self.at.progress()):
                    finished = self._train(flag, stop_at)
                if finished:
                    return self._leave(0, "finished")
                return self._leave(EXIT_SAVED, flag.name or "stopped")
        except BaseException as error:
            self._fail(error)
            raise

    def _train(self, flag: SignalFlag, stop_at: int | None) -> bool:
        """Steps until the last one, a signal on any rank or `stop_at`; True if the run is finished.

        State is saved before an evaluation, which may take long. A signal cuts an evaluation short
        or leaves it out; the next attempt makes up for it.
        """
        at, settings = self.at, self.config.checkpoint
        interval, has_best = settings.interval, settings.keep_best is not None
        self.clock.begin(self.step + 1)

        # What an earlier attempt was kept from by a signal or its death, sets that are new, and
        # what comes before the first step.
        leaving = at.step == stop_at
        if not leaving and (missing := self.evaluations.missing()):
            leaving = not self._evaluate(flag, missing)

        while at.step < at.total_steps and not leaving:
            edge = self._step(flag)
            leaving = edge.signalled or (at.step == stop_at and not at.is_last)
            saving = leaving or at.is_last or edge.save_due or at.is_due(interval)
            saving = saving or (has_best and self.evaluations.is_due)
            if saving:
                self._save()
            leaving = leaving or not self._evaluate_if_due(flag)
            if saving:  # only now is it known how good this one is
                self._delete_old()

        if at.saved_step != at.step:
            self._save()
        return at.is_last and not (leaving and self.evaluations.is_due)

    def _step(self, flag: SignalFlag) -> StepEdge:
        config, mesh, at, clock = self.config, self.mesh, self.at, self.clock
        mesh.ledger.step = at.step + 1

        # The number of valid tokens in the whole batch is known before the first microbatch runs,
        # so that each weighs the same, whatever the layout and the padding.
        with clock.phase("data", "data"):
            loaded = self._micro_batches()
            valid = count_valid_tokens(loaded, mesh)
            dropout = dropout_start(config.train.seed, at.step, loaded, mesh)
            scale = 1.0 / max(1, valid)
            micro_batches = self.engine.upload.token_batches(loaded, scale, dropout)

        # Gradients are summed over microbatches, and reduced over replicas during the last one.
        trace = at.step + 1 == config.pipeline.trace_step
        with clock.phase("forward and backward", "compute"):
            loss = self.engine.forward_backward(micro_batches, trace=trace)

        # All ranks judge the same loss before the update, so that they skip or stop together. The
        # copy of the weights that some steps measure is no part of the optimizer's time.
        before = self.stats.before() if self.stats.is_due(at.step + 1) else None
        with clock.phase("optimizer", "optimizer"):
            lr = learning_rate(at.step, config.optimizer, at.total_steps, at.tokens_before)
            spike = self._judge(loss)
            result = self._update(lr, spike)

        mesh.ledger.phase = "step edge"
        measured = {} if before is None else self.stats.after(before, result)
        edge = self._agree(loss, flag)
        at.step += 1

        if trace:
            save_trace(self.engine, self.folder, at.step)
        if self.log.is_open:
            line = step_record(
                config, self.device, at.plan, mesh.world.size, step=at.step, edge=edge, lr=lr,
                loss_tokens=valid, result=result, memory_peak_bytes=memory_peak_bytes(mesh.device),
            )  # fmt: skip
            self.log.step(line | measured, result.skipped, at.progress(at.step))
        if result.skipped:
            self._count_skip(result, spike)
        return edge

    def _agree(self, loss: torch.Tensor, flag: SignalFlag) -> StepEdge:
        """The sums over all ranks of the loss, the signals and the time of a step."""
        # Reading the loss synchronises the device: only then can the clock read its marks.
        mine_loss = torch.stack([loss, self.engine.z_loss]).cpu()
        times = self.clock.finish()
        numbers = [float(flag.raised), self._save_is_due(), times.wall_s, *times.parts_s.values()]
        mine = torch.cat([mine_loss, torch.tensor(numbers, dtype=torch.float64)])
        total = comm.all_reduce(mine.to(self.mesh.device), self.mesh.edge).tolist()

        loss_sum, z_loss, signalled, save_due, *seconds = total
        wall_s, *parts_s = (second / self.mesh.world.size for second in seconds)
        return StepEdge(
            loss_sum,
            z_loss,
            signalled > 0,
            save_due > 0,
            wall_s,
            dict(zip(times.parts_s, parts_s, strict=True)),
        )

    def _is_measured(self, step: int) -> bool:
        """True if the time of a step is split: of each on CPU, on GPUs of those with a line."""
        on_host = self.mesh.device.type == "cpu"
        return on_host or has_line(self.config, step, self.at.total_steps)

    # --- the parts of a step ---------------------------------------------------------------------

    def _micro_batches(self) -> list[MicroBatch]:
        """This rank's microbatches of the step at hand, read ahead in a thread."""
        if self.loader is None:  # made once the plan of batches is known, which a resume may change
            plan, stop = self.at.plan, self.at.total_steps
            self.loader = step_loader(self.data.train, plan, stop, self.config, self.mesh)
        return self.loader.step(self.step)

    def _judge(self, loss: torch.Tensor) -> Spike | None:
        """The spike, on all ranks, if the loss is one; no collective if the policy is off."""
        if not self.at.guard.active:
            return None
        total = comm.all_reduce(loss.detach().clone(), self.mesh.world)
        return self.at.guard.judge(float(total))

    def _update(self, lr: float, spike: Spike | None) -> StepResult:
        """Apply the gradients, unless the loss is a spike.

        Raises NonFiniteGradientError or LossSpikeError, with the step, if the settings end the run.
        """
        try:
            result = self.engine.optimizer.step(lr, skip_update=spike is not None)
        except NonFiniteGradientError as error:
            raise NonFiniteGradientError(f"step {self.step + 1}: {error}") from None
        if spike is not None and spike.stop:
            raise LossSpikeError(self.at.guard.message(self.step + 1, spike))
        return result

    def _count_skip(self, result: StepResult, spike: Spike | None) -> None:
        """Count and record a step that left the weights alone; its data is used up all the same."""
        is_spike = spike is not None and result.usable
        reason = SPIKE if is_spike else NON_FINITE
        self.at.skips[reason] += 1
        count = self.at.skips[reason]
        if spike is not None and is_spike:
            text = f"{spike.text}; update skipped ({count} so far)"
        else:
            text = (
                f"gradients are not finite or too large; update skipped ({count} so far, "
                f"loss scale {result.loss_scale:g})"
            )
        self.log.skip(self.step, reason, text, count, result.loss_scale)

    # --- evaluations, checkpoints ----------------------------------------------------------------

    def _evaluate_if_due(self, flag: SignalFlag) -> bool:
        """False if an evaluation was due and a signal cut it short."""
        return not self.evaluations.is_due or self._evaluate(flag)

    def _evaluate(self, flag: SignalFlag, sets: Sequence[EvalSet] | None = None) -> bool:
        """Evaluate the sets that are due, or `sets`; False if a signal cut it short."""
        self.clock.stop()  # the time of an evaluation belongs to no step
        whole = self.evaluations.run(lambda: self._signalled(flag), sets)
        self.clock.begin(self.step + 1)
        return whole

    def _signalled(self, flag: SignalFlag) -> bool:
        """True if any rank has had a signal; all ranks call it."""
        mine = torch.tensor([float(flag.raised)], device=self.mesh.device)
        return bool(comm.all_reduce(mine, self.mesh.edge, op="max")[0] > 0)

    @property
    def _elapsed_s(self) -> float:
        """Seconds since the last save, or since the start."""
        return time.monotonic() - self._saved_at_s

    def _save_is_due(self) -> bool:
        """True on rank 0, whose clock decides for all, if checkpoint.interval_s has gone by."""
        return self.mesh.rank == 0 and 0 < self.config.checkpoint.interval_s <= self._elapsed_s

    def _save(self) -> None:
        began = time.perf_counter()
        self.clock.stop()
        self.mesh.ledger.phase = "checkpoint"
        kept = self.at.state() | {
            "data": as_saved(self.data.identities),
            "kernels": kernel_record(self.engine.ops),
            TOKENIZER: tokenizer_record(self.tokenizer),
        }
        path = state.save_run(self.engine, self.checkpoints, self.step, kept)
        self.at.saved_step, self._saved_at_s = self.step, time.monotonic()
        self.log.checkpoint(self.step, path, time.perf_counter() - began)
        self.clock.begin(self.step + 1)

    def _delete_old(self) -> None:
        """Delete the checkpoints that need not stay now that this step is saved."""
        self.clock.stop()
        self.mesh.ledger.phase = "checkpoint"
        self.retention.clean_up(self.step, self.at.losses, Ranks(self.mesh.world))
        self.clock.begin(self.step + 1)

    # --- begin and end ---------------------------------------------------------------------------

    def _lock(self) -> None:
        """Lock the run folder on rank 0."""
        if self.mesh.rank == 0:
            self.log.lock()

    def _resume(self) -> None:
        """Go on from the newest checkpoint, or begin, maybe with another run's weights."""
        data = as_saved(self.data.identities)
        found = resume(self.engine, self.checkpoints, data, self.accept, self.console.print)
        if found is not None:
            self.at.restore(found)
        elif self.config.checkpoint.load_weights is not None:
            named = self.config.checkpoint.load_weights
            source, lines = load_weights(self.engine, named, self.accept)
            self.at.weights_from = origin_record(named, source)
            for line in lines:
                self.console.print(line)

    def _open_log(self) -> None:
        """Open the run folder on rank 0; write the record's first line and the console's header."""
        if self.mesh.rank != 0:
            return
        config, at, ops = self.config, self.at, self.engine.ops
        memory, size = self.engine.optimizer.memory_report(), self.mesh.world.size
        first = run_record(config, size, self.device, memory, kernel_record(ops))
        if at.changed:
            first["changed"] = as_records(at.changed)
        lines = [
            *run_lines(self.folder, config, size, self.device, memory, ops.name),
            *plain_on_gpu(config, ops, self.mesh.device, self.engine.dtype),
            *describe_data(config, self.data, at.taken(at.step), at.taken(at.total_steps)),
            *unreached(config, at.total_steps),
            f"checkpoints: {storage_line(config, at.total_steps)}",
            *self.retention.survey(),
        ]
        self.log.open(at.step, at.total_steps, first, lines)
        keep_tokenizer(self.tokenizer, self.folder)

    def _leave(self, code: int, reason: str) -> int:
        more = "; the same command goes on from there" if code == EXIT_SAVED else ""
        self.console.print(f"{reason} at step {self.step} of {self.at.total_steps}{more}")
        self._close()
        self.log.close(self.step, reason, code)
        return code

    def _fail(self, error: BaseException) -> None:
        """Note in the run folder, if it is open, why the run ends; the caller reports the error."""
        self.log.fail(self.step, f"{type(error).__name__}: {error}", exit_code(error))
        self._close()

    def _close(self) -> None:
        self.clock.stop()
        if self.loader is not None:
            self.loader.close()
