"""Losses as custom operators: cross entropy of logits, and fused with the product that makes them.

Both are over a whole vocabulary on one rank; a vocabulary split over ranks goes through
`tensor_parallel.cross_entropy`, which calls the same kernels around its collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.operators.checks import check_indices
from megalite.kernels.operators.common import new_stats, operator, ops_of, stated_types


def _unchecked(label_T: Tensor, vocab_size: int) -> int | None:
    """The bound for labels that `check_indices` did not read, None if it did."""
    return None if label_T.device.type == "cpu" else vocab_size


@operator("megalite::cross_entropy")
def cross_entropy(
    logits_TV: Tensor,
    label_T: Tensor,
    weight_T: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """(loss[T], log-sum-exp[T]); columns from vocab_size on are padding."""
    check_indices("cross_entropy", "label", label_T, vocab_size, ignore_index)
    ops = ops_of(logits_TV)
    stats_T3 = ops.cross_entropy_stats(
        logits_TV, label_T, 0, vocab_size, smoothing=smoothing, vocab_size=vocab_size
    )
    return ops.cross_entropy_combine(
        stats_T3.unsqueeze(0),
        label_T,
        weight_T=weight_T,
        ignore_index=ignore_index,
        z_loss=z_loss,
        vocab_size=_unchecked(label_T, vocab_size),
    )


@cross_entropy.register_fake
def _(
    logits_TV: Tensor,
    label_T: Tensor,
    weight_T: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    tokens = len(logits_TV)
    return new_stats(logits_TV, tokens), new_stats(logits_TV, tokens)


@operator("megalite::cross_entropy_grad")
def cross_entropy_grad(
    logits_TV: Tensor,
    label_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    weight_T: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
) -> Tensor:
    """dlogits[T, V], in memory of its own."""
    return ops_of(logits_TV).cross_entropy_grad_(
        logits_TV.clone(),
        label_T,
        lse_T,
        dloss_T,
        0,
        vocab_size,
        weight_T=weight_T,
        ignore_index=ignore_index,
        z_loss=z_loss,
        smoothing=smoothing,
        vocab_size=vocab_size,
    )


@cross_entropy_grad.register_fake
def _(
    logits_TV: Tensor,
    label_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    weight_T: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
) -> Tensor:
    return torch.empty_like(logits_TV)


@operator("megalite::linear_cross_entropy")
def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    weight_T: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """(loss[T], log-sum-exp[T]) of logits x @ weight^T, `chunk_tokens` rows of them at a time."""
    check_indices("linear_cross_entropy", "label", label_T, vocab_size, ignore_index)

    # Only the statistics of a chunk stay: its logits are freed before the next chunk's are made.
    ops = ops_of(x_TD)
    chunks = zip(x_TD.split(chunk_tokens), label_T.split(chunk_tokens), strict=True)
    with stated_types(x_TD):
        stats = [
            ops.cross_entropy_stats(
                ops.linear(x, weight_VD), label, 0, vocab_size, smoothing=smoothing,
                vocab_size=vocab_size,
            )
            for x, label in chunks
        ]  # fmt: skip

    return ops.cross_entropy_combine(
        torch.cat(stats).unsqueeze(0),
        label_T,
        weight_T=weight_T,
        ignore_index=ignore_index,
        z_loss=z_loss,
        vocab_size=_unchecked(label_T, vocab_size),
    )


@linear_cross_entropy.register_fake
def _(
    x_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    weight_T: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    return new_stats(x_TD, len(x_TD)), new_stats(x_TD, len(x_TD))


@operator("megalite::linear_cross_entropy_grad")
def linear_cross_entropy_grad(
    x_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    weight_T: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
    chunk_tokens: int,
    with_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(dx[T, D], dweight[V, D] in the summing type); computes the logits of each chunk again.

    with_weight: False if the matrix requires no gradient; dweight then has no elements.
    """
    ops, shape = ops_of(x_TD), weight_VD.shape if with_weight else (0,)
    dx_TD, dweight_VD = torch.empty_like(x_TD), new_stats(x_TD, *shape).zero_()

    # The gradient overwrites a chunk's logits, which are the only large tensor in memory.
    with stated_types(x_TD):
        for start in range(0, len(x_TD), chunk_tokens):
            here = slice(start, start + chunk_tokens)
            dlogits = ops.cross_entropy_grad_(
                ops.linear(x_TD[here], weight_VD),
                label_T[here],
                lse_T[here],
                dloss_T[here],
                0,
                vocab_size,
                weight_T=None if weight_T is None else weight_T[here],
                ignore_index=ignore_index,
                z_loss=z_loss,
                smoothing=smoothing,
                vocab_size=vocab_size,
            )
            dx_TD[here] = ops.linear_input_grad(dlogits, weight_VD)
            if with_weight:
                ops.accumulate_weight_grad_(dweight_VD, dlogits, x_TD[here])
    return dx_TD, dweight_VD


@linear_cross_entropy_grad.register_fake
def _(
    x_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    weight_T: Tensor | None,
    ignore_index: int,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
    chunk_tokens: int,
    with_weight: bool,
) -> tuple[Tensor, Tensor]:
    shape = weight_VD.shape if with_weight else (0,)
    return torch.empty_like(x_TD), new_stats(x_TD, *shape)
