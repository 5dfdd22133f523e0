"""What `megalite plan` says of a run: layout, stages, memory and least time; and what would fit.

Memory is counted tensor by tensor (`megalite.planner`). Time is a bound: products at the peak of
the device's data sheet, in the order of the simulated schedule; nothing trains as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megalite.cli.schedule_config import Plan, plan_of, stage_lines
from megalite.cli.words import count
from megalite.config import RunConfig
from megalite.errors import ConfigError, ScheduleError
from megalite.hardware import Hardware, number_format, peak_of
from megalite.model_math import parameter_counts, training_flops
from megalite.planner import RankMemory, Stage, beside_tensors, held_by, rank_memory, stages_of
from megalite.schedules import Schedule, Timeline, simulate

GIB = 2**30


@dataclass(frozen=True)
class Report:
    """A run as it was asked for, and what it comes to; bytes are of one rank."""

    path: str
    overrides: tuple[str, ...]
    gpus: int | None
    plan: Plan

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def dp(self) -> int:
        return self.config.parallel.dp or 1

    @property
    def world_size(self) -> int:
        parallel = self.config.parallel
        return parallel.tp * parallel.pp * self.dp

    @cached_property
    def schedule(self) -> Schedule:
        return self.plan.schedule(self.plan.name)[0]

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.plan.durations)

    @cached_property
    def stages(self) -> list[Stage]:
        return stages_of(self.config, self.schedule.place)

    @cached_property
    def ranks(self) -> list[RankMemory]:
        return rank_memory(self.config, self.stages, self.schedule, self.timeline)

    @property
    def fullest(self) -> int:
        """The pipeline rank that takes most."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def most_bytes(self) -> int:
        """What the process of the fullest rank takes, tensors and all."""
        total = self.ranks[self.fullest].total
        return total + beside_tensors(total)

    def fits(self, device: Hardware) -> bool:
        return self.most_bytes <= device.memory_gib * GIB

    @property
    def step_flops(self) -> int:
        """Of the model on the global batch, with the scores that the mask leaves."""
        config = self.config
        tokens = config.train.global_batch * config.data.seq_length
        return tokens * training_flops(config.model, config.data.seq_length).total_causal

    @property
    def utilised(self) -> float:
        """The share of the ranks' time that the pipeline leaves for work."""
        return self.plan.num_micro_batches / self.timeline.makespan


def make_report(path: str, overrides: Sequence[str], gpus: int | None = None) -> Report:
    """Raises ConfigError as `megalite train` would, and ScheduleError."""
    plan = plan_of(path, list(overrides), gpus)
    return Report(path, tuple(overrides), gpus, plan)


def report_lines(report: Report, device: Hardware | None) -> Iterator[str]:
    """The report; times and what is left of memory where the device is known."""
    yield from _what(report)
    yield ""
    yield from stage_lines(report.plan)
    yield ""
    yield from _memory_table(report)
    if device is None:
        yield "name the GPU with --hardware for what fits and how long a step takes at least"
        return
    used, total = report.most_bytes / GIB, device.memory_gib
    beside = beside_tensors(report.ranks[report.fullest].total) / GIB
    yield (
        f"memory       {used:,.1f} of {total:g} GiB on {device.name}, pipeline rank "
        f"{report.fullest}; {beside:.1f} of it an estimate for CUDA, communicators and fragments"
    )
    yield _time(report, device)


def _what(report: Report) -> Iterator[str]:
    config, plan = report.config, report.plan
    model, parallel, train = config.model, config.parallel, config.train
    parameters = parameter_counts(model).total
    yield (
        f"model        {model.family}, {model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_heads} heads, vocabulary {model.vocab_size}, {count(parameters)} parameters"
    )
    chunks = f", {parallel.vpp} chunks a pipeline rank" if parallel.vpp > 1 else ""
    split = ", sequence parallel" if parallel.sequence_parallel else ""
    yield (
        f"layout       tp {parallel.tp} x pp {parallel.pp} x dp {report.dp} = "
        f"{report.world_size} ranks{chunks}{split}, ZeRO-{config.optimizer.zero}"
    )
    yield (
        f"step         {train.global_batch} x {config.data.seq_length} tokens, "
        f"{report.step_flops:.3g} FLOPs; a replica has {plan.num_micro_batches} microbatches of "
        f"{train.micro_batch}"
    )
    bubble = report.timeline.bubble_fraction
    yield f"schedule     {plan.name}, bubble {bubble:.1%}; recompute {train.recompute}"


def _memory_table(report: Report) -> Iterator[str]:
    large = report.most_bytes - beside_tensors(0) >= GIB
    unit, size = ("GiB", GIB) if large else ("MiB", 2**20)
    yield f"{unit:>5}  parameters  weights  gradients  optimizer  activations  working     total"
    for rank, memory in enumerate(report.ranks):
        states = memory.states
        parts = (
            states.weights,
            states.gradients,
            states.optimizer,
            memory.activations,
            memory.working,
            memory.total,
        )
        cells = [
            f"{part / size:>{width},.2f}"
            for part, width in zip(parts, (9, 11, 11, 13, 9, 10), strict=True)
        ]
        yield f"{rank:>5}  {count(states.num_parameters):>10}{''.join(cells)}"
    longest = max(report.stages, key=lambda stage: len(stage.layers))
    layers = len(longest.layers)
    held = held_by(report.config, longest).activations / 2**20
    yield (
        "tensors of a rank, by pipeline rank; activations at the schedule's peak, of which a "
        f"microbatch holds {held:,.1f} MiB in a stage of {layers} layer{'s' * (layers != 1)}"
    )


def _time(report: Report, device: Hardware) -> str:
    train = report.config.train
    form = number_format(train.dtype, train.tf32)
    peak = peak_of(device, form)
    if peak is None:
        return f"time         n/a: {device.name} has no known peak in {form}"
    seconds = report.step_flops / (peak * 1e12 * report.world_size) / report.utilised
    return (
        f"time         at least {seconds:.3g} s a step, at the peak of {peak:g} TFLOP/s ({form}): "
        f"bubble and balance leave at most {report.utilised:.1%} of MFU"
    )


# --- what would fit ------------------------------------------------------------------------------


def changes_that_fit(report: Report, device: Hardware) -> list[tuple[str, Report]]:
    """Single changes of settings under which every rank fits, the one with most memory first.

    On as many ranks as before; none that the config check refuses.
    """
    found = []
    for change in _changes(report):
        try:
            other = make_report(
                report.path, [*report.overrides, *change.split()], report.world_size
            )
            if other.fits(device):
                found.append((change, other))
        except (ConfigError, ScheduleError):
            continue
    return sorted(found, key=lambda pair: -pair[1].most_bytes)


def _changes(report: Report) -> Iterator[str]:
    """Settings that take less memory, each as overrides."""
    config = report.config
    parallel, train = config.parallel, config.train
    stricter = {"none": ("selective", "full"), "selective": ("full",), "stage": ("full",)}
    for recompute in stricter.get(train.recompute, ()):
        yield f"train.recompute={recompute}"
    if train.micro_batch > 1:
        yield f"train.micro_batch={train.micro_batch // 2}"
    if config.optimizer.zero == 0:
        yield "optimizer.zero=1"
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield "parallel.sequence_parallel=true"
    if not train.loss_chunk_tokens:
        yield "train.loss_chunk_tokens=2048"
    for axis, size in (("tp", parallel.tp), ("pp", parallel.pp)):
        for factor in (2, 4, 8):
            if report.dp % factor == 0:
                dp = report.dp // factor
                yield f"parallel.{axis}={size * factor} parallel.dp={dp}"


def unfit_lines(
    report: Report, device: Hardware, found: Sequence[tuple[str, Report]]
) -> Iterator[str]:
    """That it does not fit, and what would."""
    over = report.most_bytes / GIB - device.memory_gib
    yield f"does not fit: pipeline rank {report.fullest} takes {over:,.1f} GiB more than there is"
    for change, other in found:
        yield f"  fits with {change}: {other.most_bytes / GIB:,.1f} GiB"
    if not found:
        yield (
            "  no single change helps of recompute, micro batch, ZeRO, chunks of the loss, tp and "
            "pp on as many ranks; combine some, or take more ranks"
        )
