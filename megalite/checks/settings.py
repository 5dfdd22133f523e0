"""Checks that the settings fit each other and the world size: all problems, one line each.

A line names the settings with their values, and values that would fit. Also fills in the settings
that a config may leave open (`resolve`). Single values are checked in config/schema.py, data in
config/inputs.py; nothing here touches files or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import gcd, lcm

from megalite.checks.kernels import kernel_problems
from megalite.checks.lengths import training_problems
from megalite.checks.precision import precision_problems
from megalite.config import RunConfig
from megalite.config.effect import without_effect
from megalite.config.families import family_defaults
from megalite.config.inputs import data_problems
from megalite.config.load import DEFAULT, OVERRIDE
from megalite.config.names import default_of, toml_value, value_of
from megalite.errors import ConfigError, ScheduleError
from megalite.layout.topology import Topology
from megalite.run.batch_plan import batch_plan, horizon_steps
from megalite.run.stages import stage_problems
from megalite.schedules.catalogue import FAMILY, SCHEDULES, build, find_schedule
from megalite.schedules.csv_form import FILE
from megalite.schedules.tune import AUTO
from megalite.wording import number_of

Origins = Mapping[str, str]


def check_config(
    config: RunConfig, world_size: int | None = None, origins: Origins | None = None
) -> list[str]:
    """Problems of a config, one line each; empty if it can run.

    `world_size` None: not known yet, so a missing parallel.dp counts as 1. `origins` (of
    load_config) distinguishes settings that the user wrote from defaults; without it, a setting
    counts as written when it differs from its default.
    """
    world = list(world_problems(config, world_size))
    dp = 1 if world else Topology.of(config.parallel, world_size).dp
    return [
        *world,
        *_model(config),
        *_layers(config),
        *_positions(config),
        *_tensor_parallel(config),
        *_pipeline(config),
        *_batch(config, dp),
        *training_problems(config, dp),
        *precision_problems(config),
        *kernel_problems(config),
        *data_problems(config),
        *_no_effect(config, origins),
    ]


def resolve(config: RunConfig, world_size: int | None = None) -> RunConfig:
    """Fill in parallel.dp, pipeline.schedule and train.steps; ConfigError for a wrong world size.

    Without a world size (processes started here, on this machine) a missing parallel.dp is 1.
    """
    problems = list(world_problems(config, world_size))
    if problems:
        raise ConfigError(problems)
    dp = Topology.of(config.parallel, world_size).dp
    parallel = config.parallel.model_copy(update={"dp": dp})
    return resolve_schedule(config.model_copy(update={"parallel": parallel}))


def resolve_schedule(config: RunConfig) -> RunConfig:
    """Fill in pipeline.schedule and train.steps, which do not depend on the world size."""
    parallel = config.parallel
    schedule = config.pipeline.schedule or default_schedule(
        parallel.pp, parallel.vpp, parallel.tp, config.train.recompute
    )
    pipeline = config.pipeline.model_copy(update={"schedule": schedule})
    steps = horizon_steps(config, batch_plan(config))
    train = config.train.model_copy(update={"steps": steps})
    return config.model_copy(update={"pipeline": pipeline, "train": train})


def default_schedule(pp: int, vpp: int, tp: int, recompute: str = "none") -> str:
    """The schedule where the config names none: the best at the memory of 1f1b by simulation.

    Under tensor parallelism it is one that computes both gradients of a layer together, so that the
    collective of the input gradient overlaps the weight gradient; and so it is where whole layers
    or stages are recomputed, since deferred weight gradients keep the activations that
    recomputation saves.
    """
    if pp == 1:
        return "1f1b"
    if tp > 1 or recompute in ("full", "stage"):
        return "interleaved" if vpp > 1 else "1f1b"
    return "interleaved-zb" if vpp > 1 else "zb-h1"


def world_problems(config: RunConfig, world_size: int | None) -> Iterator[str]:
    """One line if the layout cannot have `world_size` ranks; none where that is not known."""
    if world_size is None:
        return
    parallel, topology = config.parallel, Topology.of(config.parallel)
    tp, pp, dp = parallel.tp, parallel.pp, parallel.dp
    replica = topology.world_size // topology.dp
    if world_size % replica:
        yield (
            f"world size {world_size} is not divisible by parallel.tp={tp} x parallel.pp={pp} "
            f"= {replica}; start {_multiples_near(world_size, replica)} processes"
        )
    elif dp is not None and topology.world_size != world_size:
        yield (
            f"parallel.tp={tp} x parallel.pp={pp} x parallel.dp={dp} = {topology.world_size} is "
            f"not the world size {world_size}; set parallel.dp={world_size // replica} or start "
            f"{number_of(topology.world_size, 'process')}"
        )


def _model(config: RunConfig) -> Iterator[str]:
    model = config.model
    heads, kv_heads, hidden = model.num_heads, model.kv_heads, model.hidden_size
    if heads % kv_heads:
        yield (
            f"model.num_kv_heads={kv_heads} does not divide model.num_heads={heads}; "
            f"use {_either(_divisors(heads))}"
        )
    if model.head_dim is None and hidden % heads:
        fitting = heads * (2 if model.positions == "rope" else 1)  # rotary embedding turns pairs
        yield (
            f"model.num_heads={heads} does not divide model.hidden_size={hidden}; use "
            f"model.hidden_size={_multiples_near(hidden, fitting)}, or set model.head_dim"
        )
    elif model.rope_fraction != 1 and model.positions == "rope":
        yield from _partial_rotation(config)
    elif model.positions == "rope" and model.head_size % 2:
        source = (
            "model.hidden_size / model.num_heads" if model.head_dim is None else "model.head_dim"
        )
        smaller = f"{model.head_size - 1} or " if model.head_size > 1 else ""
        yield (
            f"{source}={model.head_size} is odd, but rotary embedding turns pairs; "
            f"use {smaller}{model.head_size + 1}"
        )


def _partial_rotation(config: RunConfig) -> Iterator[str]:
    model = config.model
    size, turned = model.head_size, model.head_size * model.rope_fraction
    if turned < 2 or abs(turned / 2 - round(turned / 2)) > 1e-9:  # 0.14 x 100 is not quite 14
        fitting = [pairs / size for pairs in (turned // 2 * 2, turned // 2 * 2 + 2)]
        use = " or ".join(f"{share:g}" for share in fitting if 0 < share <= 1)
        yield (
            f"model.rope_fraction={model.rope_fraction:g} of {size} elements a head is "
            f"{turned:g}, but rotary embedding turns pairs; use {use}"
        )


def _layers(config: RunConfig) -> Iterator[str]:
    """Kinds and parts of layers that do not fit each other."""
    model = config.model
    names = model.layers or []
    own = names != family_defaults(model.family).get("layers", [])  # of a family's, any part goes
    if own and len(names) > model.num_layers:
        yield (
            f"model.layers has {len(names)} kinds, more than model.num_layers={model.num_layers}; "
            "give those of the model, or fewer that repeat"
        )
    if own and model.sliding_window is None and any("window" in name for name in names):
        yield (
            "model.layers has layers with a window, but model.sliding_window is not set; set it, "
            "or use full"
        )
    if own and model.positions == "learned" and any("nope" in name for name in names):
        yield (
            "model.layers has layers without rotation, but model.positions=learned turns nothing; "
            "use full or window"
        )
    if model.parallel_residual and model.norm_place != "before":
        yield (
            f"model.parallel_residual=true needs model.norm_place=before, got {model.norm_place}; "
            "change one of them"
        )


def _positions(config: RunConfig) -> Iterator[str]:
    model, seq_length = config.model, config.data.seq_length
    if model.positions == "learned" and seq_length > model.max_positions:
        yield (
            f"data.seq_length={seq_length} is more than model.max_positions="
            f"{model.max_positions}; use at most {number_of(model.max_positions, 'token')}, or "
            f"model.max_positions={seq_length}"
        )
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_scaling == "llama3" and low >= high:
        yield (
            f"model.rope_low_freq_factor={low:g} is not below "
            f"model.rope_high_freq_factor={high:g}; use for example 1 and 4"
        )
    slow, fast = model.rope_beta_slow, model.rope_beta_fast
    if model.rope_scaling == "yarn" and slow >= fast:
        yield (
            f"model.rope_beta_slow={slow:g} is not below model.rope_beta_fast={fast:g}; use for "
            "example 1 and 32"
        )
    if model.rope_scaling == "yarn" and model.rope_theta <= 1:
        yield (
            f"model.rope_scaling=yarn needs model.rope_theta above 1, got {model.rope_theta:g}; "
            "use for example 10000"
        )


def _tensor_parallel(config: RunConfig) -> Iterator[str]:
    model, parallel, tp = config.model, config.parallel, config.parallel.tp
    fitting = _divisors(gcd(model.num_heads, model.kv_heads, model.ffn_hidden_size))
    use = f"use parallel.tp={_either(fitting)}"
    if model.num_kv_heads is not None and model.num_kv_heads < tp:
        raised = [d for d in _divisors(model.num_heads) if d % tp == 0][:1]
        more = f", or model.num_kv_heads={raised[0]}" if raised else ""
        yield f"parallel.tp={tp} is more than model.num_kv_heads={model.num_kv_heads}; {use}{more}"
    elif model.num_kv_heads is not None and model.num_kv_heads % tp:
        yield f"parallel.tp={tp} does not divide model.num_kv_heads={model.num_kv_heads}; {use}"
    elif model.num_heads % tp:
        yield f"parallel.tp={tp} does not divide model.num_heads={model.num_heads}; {use}"
    if model.ffn_hidden_size % tp:
        ffn = model.ffn_hidden_size
        yield f"parallel.tp={tp} does not divide model.ffn_hidden_size={ffn}; {use}"
    if model.padded_vocab_size % tp:
        yield (
            f"parallel.tp={tp} does not divide the padded vocabulary {model.padded_vocab_size} "
            f"(model.vocab_size={model.vocab_size} in multiples of "
            f"model.vocab_pad_multiple={model.vocab_pad_multiple}); "
            f"use model.vocab_pad_multiple={lcm(model.vocab_pad_multiple, tp)}"
        )
    if parallel.sequence_parallel:
        yield from _sequence_parallel(config)


def _sequence_parallel(config: RunConfig) -> Iterator[str]:
    tp, micro_batch, seq_length = (
        config.parallel.tp,
        config.train.micro_batch,
        config.data.seq_length,
    )
    if tp == 1:
        yield (
            "parallel.sequence_parallel=true has no effect with parallel.tp=1; "
            "set parallel.tp >= 2 or parallel.sequence_parallel=false"
        )
    elif micro_batch * seq_length % tp:
        step = tp // gcd(tp, micro_batch)
        yield (
            f"parallel.sequence_parallel: train.micro_batch={micro_batch} x "
            f"data.seq_length={seq_length} = {number_of(micro_batch * seq_length, 'token')}, which "
            f"parallel.tp={tp} does not divide; use "
            f"data.seq_length={_multiples_near(seq_length, step)}"
        )


def _pipeline(config: RunConfig) -> Iterator[str]:
    pp, vpp = config.parallel.pp, config.parallel.vpp
    if vpp > 1 and pp == 1:
        yield (
            f"parallel.vpp={vpp} has no effect with parallel.pp=1; "
            f"set parallel.vpp=1 or parallel.pp >= 2"
        )
    if pp == 1 and config.train.recompute == "stage":
        yield (
            "train.recompute=stage keeps only what enters a pipeline stage, and parallel.pp=1 has "
            "no microbatch under way that it could save; use train.recompute=full or selective"
        )
    yield from _schedule_options(config)
    yield from _schedule_name(config)
    yield from stage_problems(config)


def _schedule_options(config: RunConfig) -> Iterator[str]:
    """Settings of the pipeline that do not fit the schedule or the run."""
    name = config.pipeline.schedule
    limit, traced = config.pipeline.max_activations, config.pipeline.trace_step
    if traced is not None and config.train.tokens is None and traced > config.train.steps:
        yield (
            f"pipeline.trace_step={traced} is after the last step, train.steps="
            f"{config.train.steps}; use at most that"
        )
    if limit is not None and name != AUTO:
        yield (
            f"pipeline.max_activations={limit:g} has no effect with pipeline.schedule="
            f"{name or 'its default'}; set pipeline.schedule=auto or take it out"
        )


def _schedule_name(config: RunConfig) -> Iterator[str]:
    """A named schedule that does not exist, or is not defined for the layout."""
    pp, vpp, name = config.parallel.pp, config.parallel.vpp, config.pipeline.schedule
    if name is None or name == AUTO or name.startswith(FILE):
        return
    try:
        if name.startswith(FAMILY):
            build(name, 1, 1, 1)  # of the smallest size: only the name can be wrong
            return
        schedule = find_schedule(name)
    except ScheduleError as error:
        yield f"pipeline.schedule: {error}"
        return
    chunks = schedule.chunks
    if not chunks.allows(vpp):
        fitting = [other.name for other in SCHEDULES.values() if other.chunks.allows(vpp)]
        yield (
            f"pipeline.schedule={name} needs parallel.vpp {chunks.text}, got parallel.vpp={vpp}; "
            f"set parallel.vpp={chunks.minimum} or pipeline.schedule={' or '.join(fitting[:2])}"
        )
    elif schedule.v_shaped and pp == 1:
        yield f"pipeline.schedule={name} needs parallel.pp >= 2, got 1; use pipeline.schedule=1f1b"


def _batch(config: RunConfig, dp: int) -> Iterator[str]:
    micro_batch, global_batch = config.train.micro_batch, config.train.global_batch
    if global_batch % (micro_batch * dp):
        yield (
            f"train.global_batch={global_batch} is not divisible by "
            f"train.micro_batch={micro_batch} x parallel.dp={dp} = {micro_batch * dp}; "
            f"use train.global_batch={_multiples_near(global_batch, micro_batch * dp)}"
            f"{_fitting_micro_batch(global_batch, micro_batch, dp)}"
        )


def _fitting_micro_batch(global_batch: int, micro_batch: int, dp: int) -> str:
    """The largest smaller micro batch that a replica's share is a multiple of, if there is one."""
    if global_batch % dp:
        return ""
    share = global_batch // dp
    smaller = range(1, min(micro_batch, share + 1))  # a typing error may be of any size
    return f", or train.micro_batch={max(d for d in smaller if share % d == 0)}"


def _no_effect(config: RunConfig, origins: Origins | None) -> Iterator[str]:
    """Settings that are written although they do nothing."""
    for name, otherwise in without_effect(config).items():
        value = value_of(config, name)
        if value is not None and _is_written(config, name, origins):
            shown = f"{value:g}" if type(value) in (int, float) else toml_value(value).strip('"')
            yield f"{name}={shown} has no effect: {otherwise}"


def _is_written(config: RunConfig, name: str, origins: Origins | None) -> bool:
    """True if the user wrote a setting, and no override in its section may have switched it off."""
    if origins is None:
        return bool(value_of(config, name) != default_of(config, name))
    if origins[name] == OVERRIDE:
        return True
    # An override may switch off a feature whose other settings the file still has.
    section = name.split(".")[0]
    overridden = any(
        origin == OVERRIDE and key.split(".")[0] == section for key, origin in origins.items()
    )
    return origins[name] != DEFAULT and not overridden


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _multiples_near(number: int, step: int) -> str:
    """The multiples of `step` around a number that is none: "8 or 12"."""
    below = number // step * step
    return _either(m for m in (below, below + step) if m > 0)


def _either(numbers: Iterable[int]) -> str:
    """ "1, 2 or 4" """
    *most, last = (str(n) for n in numbers)
    return f"{', '.join(most)} or {last}" if most else last
