"""Rules for settings that differ between the run that saved a checkpoint and one that resumes it.

The only table of them. `free`: changes no number beyond the rounding of sums in another order
(changed kernels are reported at the resume), or only where the run's files are and what it reports.
`never`: the checkpoint would not fit. All others decide what the run computes: they are refused
unless the command line lists them with `--accept`. train/changes.py compares the configs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from megalite.config.names import keys, suggestion
from megalite.errors import CheckpointError, ConfigError

Change = Literal["free", "accept", "never"]

# The content behind data.path; not a setting, but accepted like one.
DATA = "data"
ALL_LISTED = "all-listed"

_FREE_SECTIONS = ("name", "out", "log", "eval", "checkpoint", "parallel", "pipeline", "kernels")
_FREE_KEYS = (
    "train.micro_batch",
    "train.recompute",
    "train.loss_chunk_tokens",
    "train.timeout_s",
    "train.deterministic",
    "train.loss_spike",
    "train.loss_spike_threshold",
    "train.loss_spike_window",
    "data.path",
    "data.prepare",
    "data.tokenizer",
    "data.workers",
    "data.prefetch",
    "optimizer.adam",
    "optimizer.zero",
    "optimizer.bucket_mb",
    "optimizer.overlap_grad_reduce",
    "optimizer.overlap_param_gather",
    "optimizer.non_finite",
    "optimizer.max_skips",
)
_NEVER_SECTIONS = ("model",)
# Positions in the data are counted in samples; moments are saved as their algorithm and type.
_NEVER_KEYS = ("data.seq_length", "data.packing", "optimizer.name", "optimizer.moment_dtype")
_NOT_NEVER = ("model.embedding_dropout", "model.attention_dropout", "model.residual_dropout")

# Of the model's settings those that decide which weights there are, and of what shape: weights of
# another are never loaded. The others may differ between a model and the weights it starts from.
_SHAPES = (
    "family",
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "norm",
    "positions",
    "max_positions",
    "qkv_bias",
    "attention_out_bias",
    "mlp_bias",
    "qk_norm",
    "tie_embeddings",
)

# Together they decide when the run and its decay end; free as long as no learning rate moves.
HORIZON = ("train.steps", "train.tokens", "optimizer.decay_steps", "optimizer.decay_tokens")


def may_change(name: str) -> Change:
    """The rule for a changed setting; for those in HORIZON, if it moves the learning rate."""
    section = name.split(".")[0]
    if section in _FREE_SECTIONS or name in _FREE_KEYS:
        return "free"
    if name in _NEVER_KEYS or (section in _NEVER_SECTIONS and name not in _NOT_NEVER):
        return "never"
    return "accept"


def accepted(lists: Iterable[str]) -> frozenset[str]:
    """The names in comma-separated lists; raises ConfigError for those that cannot be accepted."""
    names = [name.strip() for text in lists for name in text.split(",") if name.strip()]
    problems = [problem for name in names if (problem := _problem(name))]
    if problems:
        raise ConfigError(problems)
    return frozenset(names)


def require_resume_mode(mode: str, folder: Path, newest: str | None) -> None:
    """Raise CheckpointError if checkpoint.resume, `mode`, does not allow what is in `folder`.

    newest: the name of the newest checkpoint, if there is one: "must" needs one, "never" none.
    """
    if mode == "must" and newest is None:
        raise CheckpointError(
            f'checkpoint.resume="must", but {folder} holds no checkpoint; '
            "check name and out, or set checkpoint.resume to auto"
        )
    if mode == "never" and newest is not None:
        raise CheckpointError(
            f'checkpoint.resume="never", but {folder} holds {newest}; '
            "give the run another name, or remove the folder"
        )


def _problem(name: str) -> str | None:
    if name in (DATA, ALL_LISTED):
        return None
    if name not in keys():
        return f"--accept {name}: no such setting; {suggestion(name)[1]}"
    is_function = name.startswith("model.") and name.removeprefix("model.") not in _SHAPES
    if may_change(name) == "never" and not is_function:
        return f"--accept {name}: cannot change within a run; start a run with another name"
    return None
