"""Cross entropy over a vocabulary shard in plain torch; shapes and types as in `plain.products`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.kernels.plain.blocks import row_blocks, sum_dtype

_LOG2_E = math.log2(math.e)


def smoothing_share(smoothing: float, vocab_size: int | None) -> float:
    """The share of the label's weight that smoothing gives to every token of the vocabulary.

    Raises ValueError without the vocabulary's size.
    """
    if smoothing and not vocab_size:
        raise ValueError("cross_entropy: smoothing needs vocab_size, the number of true tokens")
    return smoothing / vocab_size if smoothing and vocab_size else 0.0


def cross_entropy_stats(
    logits_Tv: Tensor,
    label_T: Tensor,
    first_column: int,
    num_columns: int,
    *,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """The statistics of a vocabulary shard: [T, 3] = max, sum of exp(x - max), target.

    Columns are tokens first_column ... first_column + num_columns - 1 of the vocabulary; further
    columns are padding and left out. target is the label's logit, 0 if the label is in another
    shard; with smoothing e over `vocab_size` = V tokens it is (1 - e) times that, plus e / V times
    the sum of the shard's logits. A shard of padding alone gives max = -inf, sum = 0. Raises
    ValueError for smoothing without vocab_size.
    """
    share = smoothing_share(smoothing, vocab_size)
    dtype = sum_dtype(logits_Tv.dtype)
    stats_T3 = logits_Tv.new_zeros(logits_Tv.shape[0], 3, dtype=dtype)
    if num_columns == 0:
        stats_T3[:, 0] = -torch.inf
        return stats_T3

    # The label's logit is gathered before the loop: it needs no block of rows in float32.
    maximum_T, sum_T, target_T = stats_T3.unbind(1)
    index_T, owned_T = _owned_columns(label_T, first_column, num_columns)
    target = logits_Tv.gather(1, index_T.unsqueeze(1)).squeeze(1).to(dtype)
    target_T.copy_(target.mul_(1.0 - smoothing).where(owned_T, 0.0))

    for block in row_blocks(logits_Tv):
        x = logits_Tv[block, :num_columns].to(dtype)
        if smoothing:
            target_T[block].add_(x.sum(1), alpha=share)
        maximum = x.amax(1, keepdim=True)
        maximum_T[block] = maximum.squeeze(1)
        # in place only if x is a copy in another type, not a view of the logits
        shifted = x - maximum if x.dtype == logits_Tv.dtype else x.sub_(maximum)
        sum_T[block] = _exp_(shifted).sum(1)
    return stats_T3


def _owned_columns(label_T: Tensor, first_column: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """(column[T] of the label in this shard, owned[T]: the label is in this shard).

    The column of a label of another shard is a valid one, and must be masked by `owned`.
    """
    column_T = label_T - first_column
    owned_T = (column_T >= 0) & (column_T < num_columns)
    return column_T.clamp_(0, num_columns - 1), owned_T


def _exp_(x: Tensor) -> Tensor:
    """e^x in place. On CPU as 2^(x log2 e), whose loop in torch is up to four times as fast."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return x.mul_(_LOG2_E).exp2_()
    return x.exp_()


IGNORE_INDEX = -100  # torch's default


def cross_entropy_combine(
    stats_rT3: Tensor,
    label_T: Tensor | None = None,
    *,
    weight_T: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge all shards' stats [tp, T, 3], in shard order, into (loss[T], log-sum-exp[T]).

    loss = weight * (lse - target + z_loss * lse^2), 0 if the label is `ignore_index`; without
    labels no token is ignored. vocab_size: a label outside 0 ... vocab_size - 1 that is not ignored
    has a loss of NaN.
    """
    maximum_rT, sum_rT, target_rT = stats_rT3.unbind(-1)
    maximum_T = maximum_rT.amax(0)
    lse_T = maximum_T + (sum_rT * (maximum_rT - maximum_T).exp()).sum(0).log()

    loss_T = lse_T - target_rT.sum(0)
    if z_loss:
        loss_T = loss_T.addcmul_(lse_T, lse_T, value=z_loss)
    if weight_T is not None:
        loss_T = loss_T.mul_(weight_T)

    # In this order: an ignored label is outside of the vocabulary, too, so its NaN is overwritten.
    if label_T is not None:
        if vocab_size is not None:
            loss_T = loss_T.masked_fill_((label_T < 0) | (label_T >= vocab_size), torch.nan)
        loss_T = loss_T.masked_fill_(label_T == ignore_index, 0.0)
    return loss_T, lse_T


def cross_entropy_grad_(
    logits_Tv: Tensor,
    label_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    first_column: int,
    num_columns: int,
    *,
    weight_T: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Overwrite logits with their gradient dloss * (softmax - onehot); padding columns get 0.

    With z-loss factor z and smoothing e over V tokens it is
    dloss * ((1 + 2 z lse) * softmax - (1 - e) * onehot - e / V), times the token's weight, and 0
    if the label is `ignore_index`. Returns the logits. Raises ValueError for smoothing without
    vocab_size.
    """
    # Everything that depends on the token alone goes into one factor a row, outside of the loop.
    share = smoothing_share(smoothing, vocab_size)
    if weight_T is not None:
        dloss_T = (dloss_T * weight_T).to(lse_T.dtype)
    scale_T = dloss_T.masked_fill(label_T == ignore_index, 0.0)
    lse_T1 = lse_T.unsqueeze(1)
    factor_T1 = (scale_T * (1.0 + 2.0 * z_loss * lse_T) if z_loss else scale_T).unsqueeze(1)

    if num_columns:
        index_T, owned_T = _owned_columns(label_T, first_column, num_columns)
        index_T1 = index_T.unsqueeze(1)
        hit_T1 = (scale_T * owned_T * (smoothing - 1.0)).unsqueeze(1)
        for block in row_blocks(logits_Tv):
            x = logits_Tv[block, :num_columns]
            p = x if x.dtype == lse_T.dtype else x.to(lse_T.dtype)
            _exp_(p.sub_(lse_T1[block])).mul_(factor_T1[block])
            if smoothing:
                p.sub_(scale_T[block, None] * share)
            p.scatter_add_(1, index_T1[block], hit_T1[block])
            if p is not x:
                x.copy_(p)

    # Last, because infinite or NaN logits of rows without weight give NaN in the loop.
    logits_Tv[:, num_columns:] = 0
    _clear_rows_(logits_Tv, (dloss_T == 0) | (label_T == ignore_index))
    return logits_Tv


def _clear_rows_(dlogits_Tv: Tensor, unused_T: Tensor) -> None:
    """Fill the rows of tokens without weight with zeros."""
    if dlogits_Tv.device.type == "cpu":
        dlogits_Tv.index_fill_(0, unused_T.nonzero().flatten(), 0.0)
    else:  # indexes would make the host wait for their number
        dlogits_Tv.masked_fill_(unused_T.unsqueeze(1), 0.0)
