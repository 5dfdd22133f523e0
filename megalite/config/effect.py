"""Settings that do nothing unless another setting has a certain value: a table for the checks.

Such a setting is refused where it is written, so `to_toml` leaves it out. One that only the run's
length makes idle is not refused but reported at the run's start (`unreached`): an interval, or a
window of losses, as a run of a few steps, or one that is to be made longer, keeps the settings of
the whole run; and a trait of the model, which short sequences do not change. A run still evaluates,
saves and logs at its end, whatever the interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalite.config.names import value_of
from megalite.config.schema import RunConfig
from megalite.wording import number_of


@dataclass(frozen=True)
class Effect:
    """Settings that have an effect where `active` holds; `otherwise` explains why not."""

    names: tuple[str, ...]
    active: Callable[[RunConfig], bool]
    otherwise: str


def effective_window(config: RunConfig) -> int | None:
    """The sliding window in tokens, or None if there is none or no sequence is longer than it."""
    window = config.model.sliding_window
    return window if window is not None and window < config.data.seq_length else None


EFFECTS: tuple[Effect, ...] = (
    Effect(
        (
            "model.rope_theta",
            "model.rope_fraction",
            "model.rope_scaling",
            "model.rope_local_theta",
        ),
        lambda c: c.model.positions == "rope",
        "model.positions=learned turns nothing; remove it or set model.positions=rope",
    ),
    Effect(
        ("model.rope_factor",),
        lambda c: c.model.positions == "rope" and c.model.rope_scaling is not None,
        "nothing scales the rotation; remove it or set model.rope_scaling",
    ),
    Effect(
        ("model.rope_low_freq_factor", "model.rope_high_freq_factor"),
        lambda c: c.model.positions == "rope" and c.model.rope_scaling == "llama3",
        "only one kind of scaling uses it; remove it or set model.rope_scaling=llama3",
    ),
    Effect(
        (
            "model.rope_beta_fast",
            "model.rope_beta_slow",
            "model.rope_truncate",
            "model.rope_attention_factor",
        ),
        lambda c: c.model.positions == "rope" and c.model.rope_scaling == "yarn",
        "only one kind of scaling uses it; remove it or set model.rope_scaling=yarn",
    ),
    Effect(
        ("model.rope_original_max_position",),
        lambda c: c.model.positions == "rope" and c.model.rope_scaling in ("llama3", "yarn"),
        "only two kinds of scaling use it; remove it or set model.rope_scaling=llama3 or yarn",
    ),
    Effect(
        ("model.rope_local_theta",),
        lambda c: any(kind.rotation == "local" for kind in c.model.kinds),
        "no layer has a window and rotation; remove it, or set model.sliding_window",
    ),
    Effect(
        ("model.sliding_window",),
        lambda c: any(kind.window is not None for kind in c.model.kinds),
        "no layer of model.layers has a window; remove it, or give one the kind window",
    ),
    Effect(
        ("model.qk_norm_over",),
        lambda c: c.model.qk_norm,
        "queries and keys have no norm; remove it or set model.qk_norm=true",
    ),
    Effect(
        ("model.max_positions",),
        lambda c: c.model.positions == "learned",
        "model.positions=rope keeps no table; remove it or set model.positions=learned",
    ),
    Effect(
        ("optimizer.min_lr",),
        lambda c: c.optimizer.lr_schedule != "constant",
        "optimizer.lr_schedule=constant never decays; remove it or use linear or cosine",
    ),
    Effect(
        ("optimizer.decay_steps", "optimizer.decay_tokens"),
        lambda c: c.optimizer.lr_schedule not in ("constant", "inverse_sqrt"),
        "optimizer.lr_schedule=constant never decays and inverse_sqrt has no end; remove it "
        "or use linear, cosine or wsd",
    ),
    Effect(
        ("optimizer.wsd_decay_steps", "optimizer.wsd_decay_tokens", "optimizer.wsd_decay_shape"),
        lambda c: c.optimizer.lr_schedule == "wsd",
        "only optimizer.lr_schedule=wsd has a last phase; remove it or set "
        "optimizer.lr_schedule=wsd",
    ),
    Effect(
        ("train.loss_spike_threshold", "train.loss_spike_window"),
        lambda c: c.train.loss_spike != "off",
        "train.loss_spike=off watches no loss; remove it or set train.loss_spike=stop or skip",
    ),
    Effect(
        ("optimizer.overlap_param_gather",),
        lambda c: c.optimizer.zero > 0,
        "optimizer.zero=0 gathers no parameters; remove it or set optimizer.zero=1",
    ),
    Effect(
        ("optimizer.max_skips",),
        lambda c: "skip" in (c.optimizer.non_finite, c.train.loss_spike),
        "optimizer.non_finite=stop and train.loss_spike=stop (or off) skip no step; remove it or "
        "set one of them to skip",
    ),
    Effect(
        ("optimizer.grad_reduce_dtype",),
        lambda c: c.parallel.dp is None or c.parallel.dp > 1,
        "parallel.dp=1 reduces no gradients; remove it or set parallel.dp >= 2",
    ),
    Effect(
        ("train.tf32",),
        lambda c: c.train.dtype == "float32",
        "only float32 products can use TF32; remove it or set train.dtype=float32",
    ),
    Effect(
        (
            "optimizer.loss_scale",
            "optimizer.loss_scale_min",
            "optimizer.loss_scale_interval",
            "optimizer.loss_scale_hysteresis",
            "optimizer.loss_scale_backoff",
        ),
        lambda c: c.train.dtype == "float16",
        "only train.dtype=float16 scales the loss; remove it or set train.dtype=float16",
    ),
    Effect(
        (
            "optimizer.muon_momentum",
            "optimizer.muon_nesterov",
            "optimizer.muon_steps",
            "optimizer.muon_scale",
        ),
        lambda c: c.optimizer.name == "muon",
        "optimizer.name=adamw does not use it; remove it or set optimizer.name=muon",
    ),
    Effect(
        ("optimizer.muon_dtype",),
        lambda c: c.optimizer.name == "muon" and c.train.dtype != "float64",
        "only optimizer.name=muon iterates, and with train.dtype=float64 it does so in float64; "
        "remove it",
    ),
    Effect(
        ("kernels.norm",),
        lambda c: c.model.norm == "rmsnorm" or c.model.qk_norm,
        "model.norm=layernorm has no RMSNorm; remove it",
    ),
    Effect(
        ("checkpoint.load_weights",),
        lambda c: c.checkpoint.resume != "must",
        "checkpoint.resume=must starts from this run's own checkpoint; remove one of the two",
    ),
    Effect(
        (
            "log.wandb.mode",
            "log.wandb.entity",
            "log.wandb.group",
            "log.wandb.tags",
            "log.wandb.timeout_s",
        ),
        lambda c: c.log.wandb.project is not None,
        "log.wandb.project is not set; remove it or set log.wandb.project",
    ),
    Effect(
        ("eval.at_start", "eval.weights", "eval.sets", "eval.batches", "checkpoint.keep_best"),
        lambda c: c.eval.interval > 0,
        "eval.interval=0 never evaluates; remove it or set eval.interval",
    ),
    Effect(
        ("data.prepare",),
        # A blend may stand in for the path of a base, which brings these words along.
        lambda c: c.data.path is not None or bool(c.data.sources),
        "it makes data.path, which is not set; remove it or set data.path",
    ),
    Effect(
        ("data.split_at",),
        lambda c: c.data.packing == "stream",
        "data.packing=documents cuts at documents anyway; remove it",
    ),
    Effect(
        ("data.long_documents",),
        lambda c: c.data.packing == "documents",
        "data.packing=stream cuts documents of any length; remove it or set data.packing=documents",
    ),
    Effect(
        ("data.weights",),
        lambda c: bool(c.data.sources),
        "data.path is the only source; remove it or give data.sources",
    ),
    Effect(
        ("data.eod_mask_loss",),
        lambda c: not c.data.document_masks,
        "data.document_masks=true masks these labels, too; remove it",
    ),
    Effect(
        ("data.reset_positions",),
        lambda c: c.model.positions == "learned" and c.data.document_masks,
        "it needs model.positions=learned and data.document_masks=true: rotary positions count as "
        "differences, which are the same within a document; remove it or set these",
    ),
    Effect(
        ("data.prefetch",),
        lambda c: c.data.workers > 0,
        "data.workers=0 reads nothing ahead; remove it or set data.workers=1",
    ),
    Effect(
        ("parallel.overlap_tp",),
        lambda c: c.parallel.tp > 1,
        "parallel.tp=1 has no collective to overlap; remove it or set parallel.tp >= 2",
    ),
    Effect(
        ("parallel.embedding_layers", "parallel.head_layers"),
        lambda c: c.parallel.balance == "layers",
        "parallel.balance=cost counts FLOPs; remove it or set parallel.balance=layers",
    ),
    Effect(
        ("parallel.balance", "parallel.embedding_layers", "parallel.head_layers"),
        lambda c: c.parallel.pp > 1 and c.parallel.stage_layers is None,
        "layers are spread by cost only with parallel.pp >= 2 and without parallel.stage_layers; "
        "remove it",
    ),
)


def without_effect(config: RunConfig) -> dict[str, str]:
    """Dotted names of settings that do nothing in this config -> the reason, in words."""
    idle = [effect for effect in EFFECTS if not effect.active(config)]
    return {name: effect.otherwise for effect in idle for name in effect.names}


_UNREACHED = {
    "eval.interval": "evaluated at the end only",
    "checkpoint.interval": "no save by steps",
    "checkpoint.keep_every": "no checkpoint stays by it",
    "log.interval": "only the last step has a line here",
    "log.param_stats_interval": "nothing is measured",
}


def unreached(config: RunConfig, steps: int) -> list[str]:
    """One line for each interval, window or rate with which a run of so many steps does nothing."""
    if steps == 0:
        return []
    values = {name: value_of(config, name) for name in _UNREACHED}
    lines = [
        f"{name}={value} is more than the run's {number_of(steps, 'step')}: {_UNREACHED[name]}"
        for name, value in values.items()
        if value > steps
    ]
    train = config.train
    if train.loss_spike != "off" and train.loss_spike_window >= steps:
        lines.append(
            f"train.loss_spike_window={train.loss_spike_window} is not full before the last of the "
            f"run's {number_of(steps, 'step')}: no loss is judged"
        )

    # Not refused: the window is the model's, and a rate of 0 measures without training.
    window = config.model.sliding_window
    if window is not None and effective_window(config) is None:
        lines.append(
            f"model.sliding_window={window} is not shorter than data.seq_length="
            f"{config.data.seq_length}: it hides nothing"
        )
    if config.optimizer.lr == 0:
        lines.append("optimizer.lr=0: no step changes a weight")
    return lines
