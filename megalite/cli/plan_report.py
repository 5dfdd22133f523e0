"""The report of `megalite plan` about a run: layout, stages, memory and least time.

Memory is counted tensor by tensor (`megalite.planner`). Time is a lower bound: products at the peak
of the device's data sheet, recomputed ones too, in the order of the simulated schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megalite.cli.formatting import short_count, short_duration
from megalite.cli.schedule_config import Plan, plan_of, stage_lines, stage_values
from megalite.config import RunConfig
from megalite.layout.topology import Topology
from megalite.planner import RankMemory, beside_tensors, microbatch_bytes, rank_memory
from megalite.planner.storage import checkpoint_bytes, storage_bytes, storage_line
from megalite.run.batch_plan import batch_plan
from megalite.run.hardware import Hardware, number_format
from megalite.run.model_math import parameter_counts, training_flops
from megalite.run.parameters import ModelStage
from megalite.run.stages import stages_of
from megalite.schedules import Durations, Schedule, Timeline, simulate
from megalite.wording import number_of

GIB = 2**30
_LONG = 50_000  # actions


@dataclass(frozen=True)
class Report:
    """A run as it was given, with its plan; bytes are those of one rank."""

    path: str
    overrides: tuple[str, ...]
    gpus: int | None
    plan: Plan

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def layout(self) -> Topology:
        return Topology.of(self.config.parallel)

    @property
    def schedule(self) -> Schedule:
        """The run's schedule for the full batch."""
        return self.plan.own

    @cached_property
    def timeline(self) -> Timeline:
        """The schedule's simulation, with the stages' modelled times."""
        return simulate(self.schedule, self.plan.durations)

    @cached_property
    def stages(self) -> list[ModelStage]:
        return stages_of(self.config, self.schedule.place)

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """The memory of each pipeline rank."""
        return rank_memory(self.config, self.stages, self.schedule, self.timeline)

    @property
    def fullest(self) -> int:
        """The pipeline rank that takes the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def most_bytes(self) -> int:
        """Bytes of the fullest rank's process: its tensors and the estimate beside them."""
        total = self.ranks[self.fullest].total
        return total + beside_tensors(total)

    def fits(self, device: Hardware) -> bool:
        """True if every rank's process fits the memory of a device."""
        return self.most_bytes <= device.memory_gib * GIB

    @property
    def step_flops(self) -> int:
        """Model FLOPs of a step of the full global batch, with the scores that the mask leaves."""
        config = self.config
        tokens = config.train.global_batch * config.data.seq_length
        return tokens * training_flops(config.model, config.data.seq_length).total_causal

    @property
    def utilised(self) -> float:
        """The share of the ranks' time that goes into model FLOPs.

        Bubble, imbalance of stages and recomputation take the rest.
        """
        return self.plan.num_micro_batches * self.plan.model_share / self.timeline.makespan

    @cached_property
    def even_bubble(self) -> float | None:
        """The bubble if all stages took equally long; None if the schedule is too long for that."""
        p, v = self.schedule.p, self.schedule.v
        if sum(map(len, self.schedule.ranks)) > _LONG:
            return None
        return abs(simulate(self.schedule, Durations.even(p, v)).bubble_fraction)

    @property
    def run_samples(self) -> int:
        """Samples of all steps of the run, through all stages of a batch ramp."""
        steps = self.config.train.steps
        return 0 if steps is None else batch_plan(self.config).first_sample(steps)

    def least_step_s(self, device: Hardware) -> float | None:
        """Seconds of a step of the full batch at the device's peak; None if that is not known."""
        train = self.config.train
        peak = device.peak_tflops.get(number_format(train.dtype, train.tf32))
        if peak is None:
            return None
        return self.step_flops / (peak * 1e12 * self.layout.world_size) / self.utilised

    def run_s(self, step_s: float) -> float:
        """Seconds of the run, if a step of the full batch takes `step_s`."""
        return step_s * self.run_samples / self.config.train.global_batch

    def tokens_per_s(self, step_s: float) -> float:
        """Tokens per second and rank, if a step of the full batch takes `step_s`."""
        tokens = self.config.train.global_batch * self.config.data.seq_length
        return tokens / step_s / self.layout.world_size


def make_report(path: str, overrides: Sequence[str], gpus: int | None = None) -> Report:
    """Plan the run of a config file. Raises ConfigError as `megalite train`, and ScheduleError."""
    plan = plan_of(path, list(overrides), gpus)
    return Report(path, tuple(overrides), gpus, plan)


def report_lines(report: Report, device: Hardware | None) -> Iterator[str]:
    """The lines of a report; with a device also its memory and the least time of a step."""
    yield from _run_lines(report)
    yield f"checkpoints  {storage_line(report.config, report.config.train.steps)}"
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
    yield from _time(report, device)


def _run_lines(report: Report) -> Iterator[str]:
    """Model, layout, step and schedule."""
    config, plan = report.config, report.plan
    model, parallel, train = config.model, config.parallel, config.train
    parameters = parameter_counts(model).total()
    yield (
        f"model        {model.family}, {number_of(model.num_layers, 'layer')} of "
        f"{model.hidden_size}, "
        f"{number_of(model.num_heads, 'head')}, vocabulary {model.vocab_size}, "
        f"{short_count(parameters)} parameters"
    )
    chunks = f", {parallel.vpp} chunks a pipeline rank" if parallel.vpp > 1 else ""
    split = ", sequence parallel" if parallel.sequence_parallel else ""
    yield (
        f"layout       tp {parallel.tp} x pp {parallel.pp} x dp {report.layout.dp} = "
        f"{number_of(report.layout.world_size, 'rank')}{chunks}{split}, "
        f"ZeRO-{config.optimizer.zero}"
    )
    yield (
        f"step         {train.global_batch} x {number_of(config.data.seq_length, 'token')}, "
        f"{report.step_flops:.3g} FLOPs; a replica has "
        f"{number_of(plan.num_micro_batches, 'microbatch')} of {train.micro_batch}"
    )

    # An automatic schedule is named by the one chosen. The bubble of equal stages is shown where it
    # differs: it separates the schedule's part from that of uneven stages.
    asked = str(config.pipeline.schedule)
    chosen = "" if asked == plan.name else f"{asked}: "
    bubble, even = abs(report.timeline.bubble_fraction), report.even_bubble
    differs = even is not None and abs(bubble - even) >= 5e-3
    alike = f" ({even:.1%} if all stages took alike)" if differs else ""
    named = f"{chosen}{plan.name}, bubble {bubble:.1%}{alike}"
    yield f"schedule     {named}; recompute {train.recompute}"


def _memory_table(report: Report) -> Iterator[str]:
    large = report.most_bytes - beside_tensors(0) >= GIB
    unit, size = ("GiB", GIB) if large else ("MiB", 2**20)
    yield f"{unit:>5}  parameters  weights  gradients  optimizer  activations  working     total"
    for rank, memory in enumerate(report.ranks):
        cells = [
            f"{part / size:>{width},.2f}"
            for part, width in zip(
                (*memory.parts.values(), memory.total), (9, 11, 11, 13, 9, 10), strict=True
            )
        ]
        yield f"{rank:>5}  {short_count(memory.states.num_parameters):>10}{''.join(cells)}"

    # One microbatch of the largest stage, to judge what fewer microbatches in flight would save.
    longest = max(report.stages, key=lambda stage: (len(stage.layers), not stage.first))
    kept = microbatch_bytes(report.config, longest)
    microbatch = f"{kept.activations / 2**20:,.1f} MiB"
    if report.config.train.recompute == "stage":
        microbatch = f"{kept.checkpoint / 2**20:,.1f} MiB, {microbatch} once recomputed,"
    yield (
        "tensors of a rank, by pipeline rank; activations at the schedule's peak, of which a "
        f"microbatch holds {microbatch} in a stage of {number_of(len(longest.layers), 'layer')}"
    )


def _time(report: Report, device: Hardware) -> Iterator[str]:
    train, tp = report.config.train, report.config.parallel.tp
    form = number_format(train.dtype, train.tf32)
    seconds = report.least_step_s(device)
    if seconds is None:
        yield f"time         n/a: {device.name} has no known peak in {form}"
    else:
        all_steps = short_duration(report.run_s(seconds))
        yield (
            f"time         at least {short_duration(seconds)} a step, {all_steps} for "
            f"{number_of(train.steps or 0, 'step')}; at most {report.tokens_per_s(seconds):,.0f} "
            "tokens/s a rank"
        )
        yield (
            f"             at the peak of {device.peak_tflops[form]:g} TFLOP/s ({form}), of which "
            f"bubble, balance and recomputation leave {report.utilised:.1%} to the model"
        )
    if tp > device.gpus_per_node:
        yield (
            f"note: parallel.tp={tp} is more than the {device.gpus_per_node} GPUs of a node: the "
            "collectives of every layer cross the network"
        )


def report_values(report: Report, device: Hardware | None) -> dict[str, Any]:
    """The report as plain values, bytes and seconds; None for what is not known."""
    config, plan = report.config, report.plan
    parallel = config.parallel
    step_s = None if device is None else report.least_step_s(device)
    return {
        "parameters": parameter_counts(config.model).total(),
        "layout": {
            "tp": parallel.tp,
            "pp": parallel.pp,
            "dp": report.layout.dp,
            "vpp": parallel.vpp,
            "ranks": report.layout.world_size,
            "zero": config.optimizer.zero,
        },
        "step_flops": report.step_flops,
        "micro_batches": plan.num_micro_batches,
        "schedule": {"name": plan.name, "bubble": abs(report.timeline.bubble_fraction)},
        "utilised": report.utilised,
        "stages": stage_values(plan),
        "pipeline_ranks": [
            {
                "parameters": memory.states.num_parameters,
                **{f"{part}_bytes": size for part, size in memory.parts.items()},
                "total_bytes": memory.total,
            }
            for memory in report.ranks
        ],
        "process_bytes": report.most_bytes,
        "checkpoint_bytes": checkpoint_bytes(config),
        "most_checkpoint_bytes": storage_bytes(config, config.train.steps),
        "device": None if device is None else device.name,
        "fits": None if device is None else report.fits(device),
        "least_step_s": step_s,
        "least_run_s": None if step_s is None else report.run_s(step_s),
        "most_tokens_per_s_a_rank": None if step_s is None else report.tokens_per_s(step_s),
    }
