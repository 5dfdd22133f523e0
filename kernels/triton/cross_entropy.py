"""Cross entropy over a vocabulary shard in Triton: local statistics, and the gradient in place.

Each shard reads its logits once and returns [T, 3] = maximum, sum of exp(x - maximum), target; one
gather of those gives every shard the loss (`cross_entropy_combine`). With smoothing e over a
vocabulary of V tokens, z-loss factor z, weight w of a token and label y:

    target = (1 - e) * x[y] + e / V * sum of x   (each shard has its own columns' part)
    loss = w * (lse - target + z * lse^2)
    dloss/dx[j] = w * ((1 + 2 z lse) * softmax[j] - (1 - e) [j = y] - e / V)

A label equal to `ignore_index` has weight 0. Columns past the shard's part of the true vocabulary
are padding: no sum includes them, and their gradient is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from megalite.kernels.arguments import (
    cdiv,
    check_float,
    check_last_contiguous,
    check_shape,
    vector,
)
from megalite.kernels.plain.loss import IGNORE_INDEX, smoothing_share
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose

MOST_LABELS = (1 << 31) - 1  # the bound of labels if the size of the vocabulary is not given


@prepared
@triton.jit
def _stats_kernel(
    logits_ptr,
    label_ptr,
    stats_ptr,
    stride,
    first_column,
    num_columns,
    smoothing,
    smoothing_share,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    lane = tl.arange(0, BLOCK)

    # every lane keeps its own maximum and sum: one reduction over lanes, at the end
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    plain = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, num_columns, BLOCK, num_stages=STAGES):
        inside = start + lane < num_columns
        x = tl.load(logits_ptr + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, x)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.exp(x - shift)
        top = new_top
        if SMOOTH:
            plain += tl.where(inside, x, 0.0)

    # shift is 0 instead of -inf if there is no logit, since -inf - -inf is NaN
    row_top = tl.max(top, 0)
    shift = tl.where(row_top == float("-inf"), 0.0, row_top)
    row_total = tl.sum(total * tl.exp(top - shift), 0)

    column = tl.load(label_ptr + row) - first_column
    owned = (column >= 0) & (column < num_columns)
    target = tl.load(logits_ptr + column, mask=owned, other=0.0).to(tl.float32)
    if SMOOTH:
        target = (1.0 - smoothing) * target + smoothing_share * tl.sum(plain, 0)
    tl.store(stats_ptr + row * 3, row_top)
    tl.store(stats_ptr + row * 3 + 1, row_total)
    tl.store(stats_ptr + row * 3 + 2, target)


@prepared
@triton.jit
def _combine_kernel(
    stats_ptr,
    label_ptr,
    weight_ptr,
    loss_ptr,
    lse_ptr,
    num_tokens,
    num_shards,
    ignore_index,
    vocab_size,
    z_loss,
    BLOCK: tl.constexpr,
    LABELS: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens

    # the maximum of all shards first, so that every shard's sum is scaled once
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    at = stats_ptr + token * 3
    for _ in range(num_shards):
        top = tl.maximum(top, tl.load(at, mask=inside, other=0.0))
        at += num_tokens * 3

    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    target = tl.zeros((BLOCK,), dtype=tl.float32)
    at = stats_ptr + token * 3
    for _ in range(num_shards):
        shard_top = tl.load(at, mask=inside, other=0.0)
        shard_total = tl.load(at + 1, mask=inside, other=0.0)
        total += shard_total * tl.exp(shard_top - shift)
        target += tl.load(at + 2, mask=inside, other=0.0)
        at += num_tokens * 3

    lse = top + tl.log(total)
    loss = lse - target + z_loss * lse * lse
    if WEIGHTS:
        loss = loss * tl.load(weight_ptr + token, mask=inside, other=0.0)
    if LABELS:
        # in this order: an ignored label is outside of the vocabulary, too
        label = tl.load(label_ptr + token, mask=inside, other=0)
        loss = tl.where((label < 0) | (label >= vocab_size), float("nan"), loss)
        loss = tl.where(label == ignore_index, 0.0, loss)
    tl.store(loss_ptr + token, loss, mask=inside)
    tl.store(lse_ptr + token, lse, mask=inside)


@prepared
@triton.jit
def _grad_kernel(
    logits_ptr,
    label_ptr,
    lse_ptr,
    dloss_ptr,
    weight_ptr,
    stride,
    first_column,
    num_columns,
    all_columns,
    ignore_index,
    z_loss,
    smoothing,
    smoothing_share,
    BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row * stride

    # the token's factor: 0 for an ignored label, whatever its dloss
    label = tl.load(label_ptr + row)
    lse = tl.load(lse_ptr + row)
    scale = tl.load(dloss_ptr + row).to(tl.float32)
    if WEIGHTS:
        scale = scale * tl.load(weight_ptr + row)
    ignored = label == ignore_index
    scale = tl.where(ignored, 0.0, scale)

    # logits without weight are not read: they may be infinite or NaN
    used = (column < num_columns) & (scale != 0.0)
    x = tl.load(logits_ptr + column, mask=used, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - lse) * (1.0 + 2.0 * z_loss * lse)
    hit = column == label - first_column
    dx = scale * (p - smoothing_share - tl.where(hit, 1.0 - smoothing, 0.0))
    dx = tl.where(used, dx, 0.0)
    tl.store(logits_ptr + column, dx.to(logits_ptr.dtype.element_ty), mask=column < all_columns)


def _check(operation: str, logits_Tv: Tensor, label_T: Tensor, num_columns: int) -> None:
    check_float(operation, logits=logits_Tv)
    check_last_contiguous(operation, logits=logits_Tv)
    check_shape(operation, (len(logits_Tv),), label=label_T)
    if label_T.dtype != torch.int64:
        raise TypeError(f"{operation}: label is {label_T.dtype}, expected torch.int64")
    if not 0 <= num_columns <= logits_Tv.shape[1]:
        raise ValueError(
            f"{operation}: num_columns={num_columns}, expected 0 to {logits_Tv.shape[1]}"
        )


def cross_entropy_stats(
    logits_Tv: Tensor,
    label_T: Tensor,
    first_column: int,
    num_columns: int,
    *,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """The statistics of a vocabulary shard: float32 [T, 3]. Raises TypeError, ValueError.

    Columns are tokens first_column ... first_column + num_columns - 1 of the vocabulary, further
    columns padding. A shard of padding alone gives maximum -inf, sum 0.
    """
    _check("cross_entropy", logits_Tv, label_T, num_columns)
    share = smoothing_share(smoothing, vocab_size)
    tokens = len(logits_Tv)
    stats_T3 = logits_Tv.new_empty(tokens, 3, dtype=torch.float32)

    # An empty grid cannot be launched.
    if tokens:
        use = choose("cross_entropy_stats")
        _stats_kernel[(tokens,)](
            logits_Tv,
            label_T.contiguous(),
            stats_T3,
            logits_Tv.stride(0),
            first_column,
            num_columns,
            smoothing,
            share,
            STAGES=use["stages"],
            SMOOTH=smoothing != 0.0,
            **use["launch"],
        )
    return stats_T3


def cross_entropy_combine(
    stats_rT3: Tensor,
    label_T: Tensor | None = None,
    *,
    weight_T: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge all shards' statistics [tp, T, 3], in shard order: (loss[T], log-sum-exp[T]).

    Without labels no token is ignored. vocab_size: a label outside 0 ... vocab_size - 1 that is not
    ignored has a loss of NaN.
    """
    shards, tokens, _ = stats_rT3.shape
    check_shape("cross_entropy_combine", (tokens,), label=label_T, weight=weight_T)

    # The kernel reads shards and tokens at fixed strides.
    stats_rT3 = stats_rT3.contiguous()
    loss_T, lse_T = (stats_rT3.new_empty(tokens) for _ in range(2))
    if tokens:
        use = choose("cross_entropy_combine")
        _combine_kernel[(cdiv(tokens, use["tokens"]),)](
            stats_rT3,
            vector(label_T),
            vector(weight_T),
            loss_T,
            lse_T,
            tokens,
            shards,
            ignore_index,
            MOST_LABELS if vocab_size is None else vocab_size,
            z_loss,
            BLOCK=use["tokens"],
            LABELS=label_T is not None,
            WEIGHTS=weight_T is not None,
            **use["launch"],
        )
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
    """Overwrite logits[T, v] with their gradient; returns them. Raises TypeError, ValueError.

    dloss_T: gradient of each token's loss (float32); may be expanded from one element.
    """
    _check("cross_entropy_grad", logits_Tv, label_T, num_columns)
    share = smoothing_share(smoothing, vocab_size)
    tokens, all_columns = logits_Tv.shape
    check_shape("cross_entropy_grad", (tokens,), lse=lse_T, dloss=dloss_T, weight=weight_T)

    # The grid covers padding columns as well: their gradient must be written, as 0.
    if logits_Tv.numel():
        use = choose("cross_entropy_grad")
        _grad_kernel[(tokens, cdiv(all_columns, use["block"]))](
            logits_Tv,
            label_T.contiguous(),
            lse_T.contiguous(),
            dloss_T.contiguous(),
            vector(weight_T),
            logits_Tv.stride(0),
            first_column,
            num_columns,
            all_columns,
            ignore_index,
            z_loss,
            smoothing,
            share,
            WEIGHTS=weight_T is not None,
            **use["launch"],
        )
    increment_version(logits_Tv)  # makes autograd refuse a second backward
    return logits_Tv
