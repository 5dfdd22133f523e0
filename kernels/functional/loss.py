"""Losses: cross entropy of logits, and fused with the product that makes them.

Both are over a whole vocabulary on one rank; a vocabulary split over ranks goes through
`tensor_parallel.cross_entropy`, which calls the same kernels around its collective.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.kernels.arguments import rows_readable
from megalite.kernels.functional.checks import (
    FLOATS,
    Arg,
    check,
    check_indices,
    check_range,
)
from megalite.kernels.functional.operator import new_stats, operator
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.loss import IGNORE_INDEX

_OPTIONS = "int ignore_index, float z_loss, float smoothing, int vocab_size"


class _Options(NamedTuple):
    """The options of a loss; columns from vocab_size on are padding."""

    ignore_index: int
    z_loss: float
    smoothing: float
    vocab_size: int


def _stats(ops: Kernels, logits: Tensor, label: Tensor, options: _Options) -> Tensor:
    """The statistics [T, 3] of rows of logits."""
    size = options.vocab_size
    return ops.cross_entropy_stats(
        logits, label, 0, size, smoothing=options.smoothing, vocab_size=size
    )


def _combine(
    ops: Kernels, stats: Tensor, label: Tensor, weight: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    """(loss[T], log-sum-exp[T])."""
    # Labels that `check_indices` did not read give NaN.
    unchecked = None if label.device.type == "cpu" else options.vocab_size
    return ops.cross_entropy_combine(
        stats.unsqueeze(0),
        label,
        weight_T=weight,
        ignore_index=options.ignore_index,
        z_loss=options.z_loss,
        vocab_size=unchecked,
    )


def _overwrite(
    ops: Kernels,
    logits: Tensor,
    label: Tensor,
    lse: Tensor,
    dloss: Tensor,
    weight: Tensor | None,
    options: _Options,
) -> Tensor:
    """The gradient of rows of logits, in their memory."""
    size = options.vocab_size
    return ops.cross_entropy_grad_(
        logits, label, lse, dloss, 0, size, weight_T=weight, **options._asdict()
    )


# --- cross entropy -------------------------------------------------------------------------------


def _compute_loss(
    ops: Kernels, logits: Tensor, label: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    given = _Options(*options)
    check_indices("cross_entropy", "label", label, given.vocab_size, given.ignore_index)
    return _combine(ops, _stats(ops, logits, label, given), label, weight, given)


def _compute_loss_grad(ops: Kernels, logits: Tensor, *others: Any) -> Tensor:
    label, lse, dloss, weight, *options = others
    return _overwrite(ops, logits.clone(), label, lse, dloss, weight, _Options(*options))


_cross_entropy_grad = operator(
    "cross_entropy_grad(Tensor logits, Tensor label, Tensor lse, Tensor dloss, Tensor? weight,"
    f" {_OPTIONS}) -> Tensor dlogits",
    _compute_loss_grad,
    lambda logits, *_: torch.empty_like(logits),
)
_cross_entropy = operator(
    f"cross_entropy(Tensor logits, Tensor label, Tensor? weight, {_OPTIONS})"
    " -> (Tensor loss, Tensor lse)",
    _compute_loss,
    lambda logits, *_: (new_stats(logits, len(logits)), new_stats(logits, len(logits))),
    _cross_entropy_grad,
)


def cross_entropy(
    logits_TV: Tensor,
    label_T: Tensor,
    weight_T: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """loss[T], float32 (float64 for float64 logits): weight * (lse - target + z_loss * lse^2).

    label_T: int64. A label equal to ignore_index has loss 0. vocab_size: the true vocabulary if
    columns are padded; smoothing is over it. For the mean, divide `.sum()` by the number of tokens
    that are not ignored, or give each token one over that number as its weight.
    """
    name, logits = "cross_entropy", Arg(logits_TV, FLOATS, "tokens, vocabulary")
    columns = check(name, logits=logits, **_token_args(label_T, weight_T))["vocabulary"]
    size = columns if vocab_size is None else vocab_size
    _check_options(name, columns, z_loss, smoothing, size)
    options = ignore_index, z_loss, smoothing, size
    loss: Tensor = _cross_entropy(rows_readable(logits_TV), label_T, weight_T, *options)[0]
    return loss


def _token_args(label_T: Tensor, weight_T: Tensor | None) -> dict[str, Arg]:
    return {
        "label": Arg(label_T, (torch.int64,), "tokens"),
        "weight": Arg(weight_T, FLOATS, "tokens", optional=True, constant=True),
    }


def _check_options(
    operation: str, columns: int, z_loss: float, smoothing: float, vocab_size: int
) -> None:
    """Raise TypeError, ValueError for numbers that a loss over so many columns does not take."""
    if not 1 <= vocab_size <= columns:
        raise ValueError(f"{operation}: vocab_size={vocab_size}, expected 1 to {columns} (columns)")
    check_range(operation, "z_loss", z_loss, 0.0, math.inf)
    check_range(operation, "smoothing", smoothing, 0.0, 1.0, last=True)


# --- with the product ----------------------------------------------------------------------------


def _compute_fused(
    ops: Kernels,
    x: Tensor,
    matrix: Tensor,
    label: Tensor,
    weight: Tensor | None,
    *options_and_chunk: Any,
) -> tuple[Tensor, Tensor]:
    *options, chunk_tokens = options_and_chunk
    given = _Options(*options)
    check_indices("linear_cross_entropy", "label", label, given.vocab_size, given.ignore_index)

    # Only the statistics of a chunk stay: its logits are freed before the next chunk's are made.
    chunks = zip(x.split(chunk_tokens), label.split(chunk_tokens), strict=True)
    stats = [_stats(ops, ops.linear(part, matrix), labels, given) for part, labels in chunks]
    return _combine(ops, torch.cat(stats), label, weight, given)


def _compute_fused_grad(
    ops: Kernels, x: Tensor, matrix: Tensor, *others: Any
) -> tuple[Tensor, Tensor | None]:
    """(dx, dmatrix in the summing type); computes the logits of each chunk again."""
    label, lse, dloss, weight, *options, chunk_tokens, wanted = others
    dx, given = torch.empty_like(x), _Options(*options)
    dmatrix = new_stats(x, *matrix.shape).zero_() if wanted else None

    # The gradient overwrites a chunk's logits, which are the only large tensor in memory.
    for start in range(0, len(x), chunk_tokens):
        here = slice(start, start + chunk_tokens)
        logits, weights = ops.linear(x[here], matrix), None if weight is None else weight[here]
        dlogits = _overwrite(ops, logits, label[here], lse[here], dloss[here], weights, given)
        dx[here] = ops.linear_input_grad(dlogits, matrix)
        if dmatrix is not None:
            ops.accumulate_weight_grad_(dmatrix, dlogits, x[here])
    return dx, dmatrix


_fused_grad = operator(
    "linear_cross_entropy_grad(Tensor x, Tensor matrix, Tensor label, Tensor lse, Tensor dloss,"
    f" Tensor? weight, {_OPTIONS}, int chunk_tokens, bool wants_matrix)"
    " -> (Tensor dx, Tensor dmatrix)",
    _compute_fused_grad,
    lambda x, matrix, *others: (
        torch.empty_like(x),
        new_stats(x, *matrix.shape) if others[-1] else None,
    ),
)
_fused = operator(
    "linear_cross_entropy(Tensor x, Tensor matrix, Tensor label, Tensor? weight,"
    f" {_OPTIONS}, int chunk_tokens) -> (Tensor loss, Tensor lse)",
    _compute_fused,
    lambda x, *_: (new_stats(x, len(x)), new_stats(x, len(x))),
    _fused_grad,
)


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    weight_T: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
    chunk_tokens: int = 1024,
) -> Tensor:
    """`cross_entropy` of x @ weight^T with at most chunk_tokens rows of logits in memory."""
    name, x = "linear_cross_entropy", Arg(x_TD, FLOATS, "tokens, columns")
    matrix = Arg(weight_VD, "x", "vocabulary, columns")
    sizes = check(name, x=x, weight_VD=matrix, **_token_args(label_T, weight_T))
    size = sizes["vocabulary"] if vocab_size is None else vocab_size
    check_range(name, "chunk_tokens", chunk_tokens, 1, math.inf)
    _check_options(name, sizes["vocabulary"], z_loss, smoothing, size)
    options = ignore_index, z_loss, smoothing, size, chunk_tokens
    loss: Tensor = _fused(x_TD, weight_VD, label_T, weight_T, *options)[0]
    return loss
