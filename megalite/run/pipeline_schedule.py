"""The pipeline schedule of a config, and modelled times of its stages."""

from __future__ import annotations

from megalite.config import RunConfig
from megalite.run.batch_plan import num_micro_batches
from megalite.run.model_math import forward_flops
from megalite.run.stages import stage_layer_counts
from megalite.schedules import Durations, Schedule, build, recompute
from megalite.schedules.csv_form import FILE, read_file
from megalite.schedules.tune import AUTO, tune


def schedule_name(config: RunConfig) -> str:
    """The name of a resolved config's schedule; for "auto", the name of the one chosen."""
    parallel, name = config.parallel, str(config.pipeline.schedule)
    if name != AUTO:
        return name
    # Chosen for the full batch: while a batch grows, stages must not change their ranks.
    full = num_micro_batches(config)
    limit, times = config.pipeline.max_activations, modelled_durations(config)
    fused = config.train.recompute in ("full", "stage")
    return tune(parallel.pp, parallel.vpp, full, times, limit, fused=fused)[0].name


def make_schedule(config: RunConfig, num_micro_batches: int) -> Schedule:
    """The schedule of a resolved config for a step of so many microbatches.

    Raises ScheduleError for a file that does not fit and a memory that no schedule keeps to.
    """
    pp, vpp, name = config.parallel.pp, config.parallel.vpp, schedule_name(config)
    if name.startswith(FILE):
        schedule = read_file(name[len(FILE) :], pp, vpp, num_micro_batches)
    else:
        schedule = build(name, pp, vpp, num_micro_batches)
    return recompute(schedule) if config.train.recompute == "stage" else schedule


def modelled_durations(config: RunConfig) -> Durations:
    """Relative times of every stage from the FLOPs of its layers and head; hops are free.

    An input gradient costs the FLOPs of the forward, with attention counted twice, and those of the
    recomputation that it needs; a weight gradient costs the FLOPs of the forward without attention,
    which has no weights.
    """
    flops = forward_flops(config.model, config.data.seq_length)
    layers = config.model.num_layers
    attention = flops.attention_causal / layers
    products = (flops.qkv + flops.attention_out + flops.mlp) / layers
    again = {"selective": attention, "full": products + attention}.get(config.train.recompute, 0.0)
    counts = stage_layer_counts(config)
    weights = [count * products for count in counts]
    weights[-1] += flops.head
    # A stage without a layer still takes a moment: times must be positive.
    least = 1e-3 * max(weights)
    pairs = list(zip(weights, counts, strict=True))
    return Durations(
        tuple(max(least, w + n * attention) for w, n in pairs),
        tuple(max(least, w + n * (2 * attention + again)) for w, n in pairs),
        tuple(max(least, w) for w, _ in pairs),
    )
