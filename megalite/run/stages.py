"""The pipeline stages of a run: the spread of its layers over pp * vpp stages.

Pure arithmetic; builds no layers. The placement of stages on ranks comes from the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megalite.config import RunConfig
from megalite.errors import ConfigError
from megalite.run.model_math import forward_flops
from megalite.run.parameters import ModelStage, Tying
from megalite.wording import number_of


def stages_of(config: RunConfig, placement: Sequence[int]) -> list[ModelStage]:
    """All stages in model order; stage s is on pipeline rank placement[s].

    Raises ConfigError if the layers do not fit the stages.
    """
    counts = stage_layer_counts(config)
    last = len(counts) - 1
    tying: Tying = "copied"
    if not config.model.tie_embeddings:
        tying = "no"
    elif last == 0:
        tying = "within"
    elif placement[0] == placement[last]:
        tying = "beside"

    stages = []
    for stage, (rank, count, stop) in enumerate(
        zip(placement, counts, accumulate(counts), strict=True)
    ):
        first, is_last = stage == 0, stage == last
        tied = tying if first or is_last else "no"
        stages.append(ModelStage(rank, range(stop - count, stop), first, is_last, tied))
    return stages


def stage_layer_counts(config: RunConfig) -> list[int]:
    """Layers of each of the pp * vpp stages, in model order; raises ConfigError if none fits.

    `parallel.stage_layers` if given, otherwise the spread with the smallest largest load, where
    the first stage also carries `embedding_layers` and the last one `head_layers`, or, with
    `balance = "cost"`, as many layers as the head's FLOPs are worth.
    """
    problems = stage_problems(config)
    if problems:
        raise ConfigError(problems)
    if config.parallel.stage_layers is not None:
        return list(config.parallel.stage_layers)
    return _spread(config)


def stage_problems(config: RunConfig) -> list[str]:
    """One line for each reason why the layers do not fit the stages; empty if they do."""
    if config.parallel.stage_layers is not None:
        return _explicit_problems(config, config.parallel.stage_layers)
    return _even_problems(config)


def spread_layers(num_layers: int, extra: list[float]) -> list[int]:
    """Spread equal layers over stages that already carry `extra` load, smallest maximum first.

    Each layer goes to the stage with the least load so far, which is optimal for equal layers.
    Ties go to middle stages from the back, then the first, then the last stage: the first keeps
    the most microbatches alive and the last has the head, whether or not `extra` counts it.
    """
    num_stages = len(extra)
    order = [*range(num_stages - 2, 0, -1), 0, num_stages - 1][:num_stages]
    counts = [0] * num_stages
    for _ in range(num_layers):
        stage = min(order, key=lambda s: extra[s] + counts[s])
        counts[stage] += 1
    return counts


def _num_stages(config: RunConfig) -> int:
    return config.parallel.pp * config.parallel.vpp


def _extra(config: RunConfig) -> list[float]:
    extra = [0.0] * _num_stages(config)
    if config.parallel.balance == "cost":
        extra[-1] += head_cost_layers(config)
        return extra
    extra[0] += config.parallel.embedding_layers
    extra[-1] += config.parallel.head_layers
    return extra


def head_cost_layers(config: RunConfig) -> float:
    """FLOPs of the head and loss over those of one layer; looking up an embedding costs nothing."""
    flops = forward_flops(config.model, config.data.seq_length)
    layers = flops.qkv + flops.attention_causal + flops.attention_out + flops.mlp
    return flops.head * config.model.num_layers / layers


def _spread(config: RunConfig) -> list[int]:
    return spread_layers(config.model.num_layers, _extra(config))


def _explicit_problems(config: RunConfig, given: list[int]) -> list[str]:
    num_layers = config.model.num_layers
    problems = []
    if len(given) != _num_stages(config):
        problems.append(
            f"parallel.stage_layers has {number_of(len(given), 'entry')}, "
            f"{_stages_text(config)} {'needs' if _num_stages(config) == 1 else 'need'} "
            f"{_num_stages(config)}; give one number for each stage"
        )
    missing = num_layers - sum(given)
    if missing:
        change = f"add {missing}" if missing > 0 else f"take away {-missing}"
        problems.append(
            f"parallel.stage_layers={given} adds up to {number_of(sum(given), 'layer')}, "
            f"model.num_layers={num_layers}; {change}"
        )
    return problems


def _even_problems(config: RunConfig) -> list[str]:
    counts, extra = _spread(config), _extra(config)
    # An empty stage is idle hardware unless its embedding or head is the work it does.
    if all(count or load for count, load in zip(counts, extra, strict=True)):
        return []
    num_layers, pp = config.model.num_layers, config.parallel.pp
    needed = _num_stages(config) - sum(1 for load in extra if load)
    return [
        f"model.num_layers={num_layers} is too few for {_stages_text(config)}, some of which "
        f"would have no layer; use at most {number_of(num_layers, 'stage')}"
        f"{_fitting_vpp(num_layers, pp)}, at least {number_of(needed, 'layer')}, "
        f"or parallel.stage_layers (where a stage may have 0)"
    ]


def _fitting_vpp(num_layers: int, pp: int) -> str:
    return f" (parallel.vpp={num_layers // pp} or fewer)" if num_layers >= pp else ""


def _stages_text(config: RunConfig) -> str:
    pp, vpp = config.parallel.pp, config.parallel.vpp
    return f"parallel.pp={pp} x parallel.vpp={vpp} = {number_of(pp * vpp, 'stage')}"
