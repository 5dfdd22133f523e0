"""Settings that do nothing unless another setting says so: data for the checks and for to_toml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalite.config import RunConfig


@dataclass(frozen=True)
class Effect:
    """`name` has an effect where `active` holds; `otherwise` says what takes it away."""

    name: str
    active: Callable[[RunConfig], bool]
    otherwise: str


EFFECTS: tuple[Effect, ...] = (
    Effect(
        "optimizer.min_lr",
        lambda c: c.optimizer.lr_schedule != "constant",
        "optimizer.lr_schedule=constant never decays; remove it or use linear or cosine",
    ),
    Effect(
        "optimizer.decay_steps",
        lambda c: c.optimizer.lr_schedule != "constant",
        "optimizer.lr_schedule=constant never decays; remove it or use linear or cosine",
    ),
    Effect(
        "optimizer.overlap_param_gather",
        lambda c: c.optimizer.zero > 0,
        "optimizer.zero=0 gathers no parameters; remove it or set optimizer.zero=1",
    ),
    Effect(
        "optimizer.max_skips",
        lambda c: c.optimizer.non_finite == "skip",
        "optimizer.non_finite=stop skips no step; remove it or set optimizer.non_finite=skip",
    ),
    Effect(
        "eval.batches",
        lambda c: c.eval.interval > 0,
        "eval.interval=0 never evaluates; remove it or set eval.interval",
    ),
    Effect(
        "parallel.overlap_tp",
        lambda c: c.parallel.tp > 1,
        "parallel.tp=1 has no collective to overlap; remove it or set parallel.tp >= 2",
    ),
    Effect(
        "parallel.embedding_layers",
        lambda c: c.parallel.pp > 1 and c.parallel.stage_layers is None,
        "layers are spread by cost only with parallel.pp >= 2 and without parallel.stage_layers; "
        "remove it",
    ),
    Effect(
        "parallel.head_layers",
        lambda c: c.parallel.pp > 1 and c.parallel.stage_layers is None,
        "layers are spread by cost only with parallel.pp >= 2 and without parallel.stage_layers; "
        "remove it",
    ),
)


def without_effect(config: RunConfig) -> dict[str, str]:
    """Dotted names of settings that do nothing in this config -> what takes their effect away."""
    return {e.name: e.otherwise for e in EFFECTS if not e.active(config)}
