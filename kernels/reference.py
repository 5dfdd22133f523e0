"""The operations in plain torch: their definition, the CPU path, and the oracle of every test.

Shapes: T tokens, D model, F feed-forward, N query heads, K key/value heads, H head dim,
V vocabulary; lower case = this rank's shard. Storage dtype in, storage dtype out; everything that
sums (norms, softmax, loss, weight gradients) is computed in at least float32. On CPU, matrix
products of 16-bit tensors are computed in float32 and rounded once: the machine has no fast 16-bit
product, and the stored values are the same as with a float32 accumulator.

Functions that end in `_` write into their first argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# What this torch has on CUDA for products of 16-bit tensors whose result is not rounded to 16 bits.
_WIDE_ADDMM = "dtype_out" in torch.ops.aten.addmm.overloads()
_WIDE_MM = "dtype" in torch.ops.aten.mm.overloads()
# Elements of a block of rows: on CPU temporaries stay near 2 MiB of float32, inside the caches;
# elsewhere a block is enough work to start for.
_BLOCK_ELEMENTS, _LARGE_BLOCK_ELEMENTS = 1 << 19, 1 << 26
_LOG2_E = math.log2(math.e)


def _low_precision_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def _row_blocks(x_TD: Tensor) -> list[slice]:
    elements = _BLOCK_ELEMENTS if x_TD.device.type == "cpu" else _LARGE_BLOCK_ELEMENTS
    rows = max(1, elements // max(1, x_TD.shape[1]))
    return [slice(start, start + rows) for start in range(0, x_TD.shape[0], rows)]


def _widened_blocks(*tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Blocks of rows, with float32 copies to write over, which lie in the same memory each time."""
    blocks = _row_blocks(tensors[0])
    wide = [
        x.new_empty(x[block].shape, dtype=torch.float32) for block in blocks[:1] for x in tensors
    ]
    for block in blocks:
        rows = [x[block] for x in tensors]
        yield block, [copy[: len(x)].copy_(x) for copy, x in zip(wide, rows, strict=True)]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- matrix products -----------------------------------------------------------------------------


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y[T, F] = x[T, D] @ weight[F, D]^T + bias[F]."""
    if _low_precision_on_cpu(x_TD):
        wide_F = None if bias_F is None else bias_F.float()
        return linear(x_TD.float(), weight_FD.float(), wide_F).to(x_TD.dtype)
    if bias_F is not None:
        return torch.addmm(bias_F, x_TD, weight_FD.t())
    return x_TD @ weight_FD.t()


def linear_input_grad(dy_TF: Tensor, weight_FD: Tensor) -> Tensor:
    """dx[T, D] = dy[T, F] @ weight[F, D]."""
    if _low_precision_on_cpu(dy_TF):
        return (dy_TF.float() @ weight_FD.float()).to(dy_TF.dtype)
    return dy_TF @ weight_FD


def accumulate_weight_grad_(buffer_FD: Tensor, dy_TF: Tensor, x_TD: Tensor) -> None:
    """buffer[F, D] += dy[T, F]^T @ x[T, D], summed in the buffer's dtype.

    The product of 16-bit inputs is never rounded to 16 bits on its way into a float32 buffer: one
    product that accumulates into it where this torch has that, else a float32 product that is then
    added, else one of widened inputs.
    """
    if buffer_FD.dtype == dy_TF.dtype:
        buffer_FD.addmm_(dy_TF.t(), x_TD)
    elif dy_TF.device.type == "cpu":
        buffer_FD.addmm_(dy_TF.to(buffer_FD.dtype).t(), x_TD.to(buffer_FD.dtype))
    elif _WIDE_ADDMM:
        torch.addmm(buffer_FD, dy_TF.t(), x_TD, out_dtype=buffer_FD.dtype, out=buffer_FD)
    elif _WIDE_MM:
        buffer_FD.add_(torch.mm(dy_TF.t(), x_TD, out_dtype=buffer_FD.dtype))
    else:
        buffer_FD.addmm_(dy_TF.to(buffer_FD.dtype).t(), x_TD.to(buffer_FD.dtype))


def bias_grad(dy_TF: Tensor) -> Tensor:
    """db[F] = sum over T of dy, in the summing dtype."""
    return dy_TF.sum(0, dtype=sum_dtype(dy_TF.dtype))


def embedding_grad_(buffer_vD: Tensor, dy_TD: Tensor, row_T: Tensor, owned_T: Tensor) -> None:
    """Add dy's rows into the buffer's rows; tokens that this shard does not own add nothing.

    row_T: int64 [T], the row in this shard (any valid row where owned_T is False).
    Deterministic: one writer per row in token order on CPU, sorted segments on CUDA.
    """
    dy_TD = dy_TD.to(buffer_vD.dtype) * owned_T.unsqueeze(1)
    if dy_TD.device.type == "cpu":
        buffer_vD.index_add_(0, row_T, dy_TD)
    else:
        rows = buffer_vD.shape[0]
        buffer_vD += torch.ops.aten.embedding_dense_backward(dy_TD, row_T, rows, -1, False)


# --- RMSNorm -------------------------------------------------------------------------------------


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y[T, D], rstd[T, 1]): y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps)."""
    x = x_TD.to(sum_dtype(x_TD.dtype))
    rstd_T1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd_T1 = rstd_T1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, rstd_T1).mul_(weight_D).to(x_TD.dtype), rstd_T1


def rms_norm_grad(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, rstd_T1: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: (dx[T, D] in x's dtype, dweight[D] in the summing dtype).

    The weight may have dims before its last (one row for each of several heads): x then has them
    too, behind T.

    With n = x * rstd and g = dy * weight:
    dx = rstd * (g - n * mean(g * n)), dweight = sum over T of dy * n.
    """
    dtype = rstd_T1.dtype
    dy, n = dy_TD.to(dtype), x_TD.to(dtype) * rstd_T1
    dweight_D = (dy * n).sum(0)
    g = dy * weight_D
    mean_T1 = torch.linalg.vecdot(g, n).unsqueeze(-1).div_(n.shape[-1])
    dx = g.sub_(n.mul_(mean_T1)).mul_(rstd_T1)
    return dx.to(x_TD.dtype), dweight_D


# --- LayerNorm -----------------------------------------------------------------------------------


def layer_norm(
    x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y[T, D], mean[T, 1], rstd[T, 1]): y = (x - mean) * rstd * weight + bias.

    rstd = 1 / sqrt(variance + eps), the variance over D elements with D as divisor.
    """
    x, weight, bias = (t.to(sum_dtype(x_TD.dtype)) for t in (x_TD, weight_D, bias_D))
    y, mean_T1, rstd_T1 = torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
    return y.to(x_TD.dtype), mean_T1, rstd_T1


def layer_norm_grad(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, mean_T1: Tensor, rstd_T1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm`: (dx[T, D] in x's dtype, dweight[D] and dbias[D] in the sums').

    With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(g * n)),
    dweight = sum over T of dy * n, dbias = sum over T of dy.
    """
    dy, x, weight = (t.to(rstd_T1.dtype) for t in (dy_TD, x_TD, weight_D))
    dx, dweight_D, dbias_D = torch.ops.aten.native_layer_norm_backward(
        dy, x, [x.shape[-1]], mean_T1, rstd_T1, weight, weight, [True, True, True]
    )
    return dx.to(x_TD.dtype), dweight_D, dbias_D


# --- GELU ----------------------------------------------------------------------------------------


def gelu(h_Tf: Tensor) -> Tensor:
    """a = h / 2 * (1 + tanh(sqrt(2 / pi) * (h + 0.044715 h^3))), the tanh form of GPT-2."""
    h = h_Tf.float() if _low_precision_on_cpu(h_Tf) else h_Tf
    return F.gelu(h, approximate="tanh").to(h_Tf.dtype)


def gelu_grad(da_Tf: Tensor, h_Tf: Tensor) -> Tensor:
    """dh[T, f] of `gelu`."""
    dtype = h_Tf.dtype
    if _low_precision_on_cpu(h_Tf):
        da_Tf, h_Tf = da_Tf.float(), h_Tf.float()
    return torch.ops.aten.gelu_backward(da_Tf, h_Tf, approximate="tanh").to(dtype)


def bias_gelu(h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False) -> Tensor:
    """a[T, f] = gelu(h + bias); erf: h / 2 * (1 + erf(h / sqrt(2))) instead of the tanh form."""
    z = h_Tf.to(sum_dtype(h_Tf.dtype))
    z = z if bias_f is None else z + bias_f
    return F.gelu(z, approximate="none" if erf else "tanh").to(h_Tf.dtype)


def bias_gelu_grad(
    da_Tf: Tensor, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(dh[T, f], dbias[f] in the summing dtype) of `bias_gelu`."""
    z = h_Tf.to(sum_dtype(h_Tf.dtype))
    z = z if bias_f is None else z + bias_f
    form = "none" if erf else "tanh"
    dz = torch.ops.aten.gelu_backward(da_Tf.to(z.dtype), z, approximate=form)
    return dz.to(h_Tf.dtype), None if bias_f is None else dz.sum(0)


# --- SwiGLU --------------------------------------------------------------------------------------


def swiglu(h_T2f: Tensor) -> Tensor:
    """a[T, f] = silu(h[:, :f]) * h[:, f:]; the first half is the gate."""
    a_Tf = h_T2f.new_empty(h_T2f.shape[0], h_T2f.shape[1] // 2)
    if _low_precision_on_cpu(h_T2f):
        for block, (h,) in _widened_blocks(h_T2f):
            gate_Tf, up_Tf = h.chunk(2, dim=-1)
            a_Tf[block] = torch.ops.aten.silu.out(gate_Tf, out=gate_Tf).mul_(up_Tf)
        return a_Tf
    for block in _row_blocks(h_T2f):
        gate_Tf, up_Tf = h_T2f[block].chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate_Tf, out=a_Tf[block]).mul_(up_Tf)
    return a_Tf


def swiglu_grad(da_Tf: Tensor, h_T2f: Tensor) -> Tensor:
    """dh[T, 2f] of `swiglu`.

    With s = sigmoid(gate): dup = da * gate * s, dgate = da * up * s * (1 + gate * (1 - s)).
    """
    dh_T2f = torch.empty_like(h_T2f)
    if _low_precision_on_cpu(h_T2f):
        for block, (h, da) in _widened_blocks(h_T2f, da_Tf):
            gate_Tf, up_Tf = h.chunk(2, dim=-1)
            dgate_Tf, dup_Tf = dh_T2f[block].chunk(2, dim=-1)
            s_Tf = gate_Tf.sigmoid()
            dup_Tf.copy_(gate_Tf.mul_(s_Tf).mul_(da))
            # as dgate = up * (da * s * (1 - s) * gate + da * s) = up * lerp(dup, da, s)
            dgate_Tf.copy_(torch.lerp(gate_Tf, da, s_Tf, out=s_Tf).mul_(up_Tf))
        return dh_T2f
    for block in _row_blocks(h_T2f):
        da, (gate_Tf, up_Tf) = da_Tf[block], h_T2f[block].chunk(2, dim=-1)
        dgate_Tf, dup_Tf = dh_T2f[block].chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate_Tf, out=dup_Tf).mul_(da)
        torch.mul(da, up_Tf, out=dgate_Tf)
        torch.ops.aten.silu_backward.grad_input(dgate_Tf, gate_Tf, grad_input=dgate_Tf)
    return dh_T2f


# --- RoPE ----------------------------------------------------------------------------------------


class RopeScaling(NamedTuple):
    """Llama 3's frequencies for contexts longer than the model was first trained on.

    A pair that turns more than `high_freq_factor` times in `original_max_position` tokens stays as
    it is, one that turns less than `low_freq_factor` times is slowed by `factor`; in between the
    two rates are blended linearly in the number of turns.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


def rope_tables(
    length_tokens: int,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, R/2], of position * theta^(-2i/R), computed in float64.

    rotary_dim R: elements of each head that turn, an even number; 0 gives tables without columns.
    Raises ValueError.
    """
    if rotary_dim < 0 or rotary_dim % 2 or length_tokens < 0 or not 0 < theta < math.inf:
        raise ValueError(
            f"rope: rotary_dim={rotary_dim}, length={length_tokens}, theta={theta}; expected an "
            "even number of elements, 0 or more positions and a positive base"
        )
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(1, rotary_dim)
    rate = theta**-exponent
    if scaling is not None:
        turns = scaling.original_max_position * rate / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        rate = rate * (kept + (1 - kept) / scaling.factor)
    position = torch.arange(length_tokens, dtype=torch.float64)
    angle = torch.outer(position, rate)
    dtype = sum_dtype(dtype)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def _turn_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """out = x turned by sign * angle; the two halves of the last dim are a complex pair.

    cos holds the cosines of both halves, sin those of one, both in out's type, which x is widened
    to. Elements beyond them are copied.
    """
    half, turned = sin.shape[-1], 2 * sin.shape[-1]
    x = x.to(out.dtype)
    if turned < x.shape[-1]:
        out[..., turned:] = x[..., turned:]
    torch.mul(x[..., :turned], cos, out=out[..., :turned])
    out[..., :half].addcmul_(x[..., half:turned], sin, value=-sign)
    out[..., half:turned].addcmul_(x[..., :half], sin, value=sign)


def turn(
    x_TNH: Tensor,
    cos_sh: Tensor,
    sin_sh: Tensor,
    position_T: Tensor | None = None,
    *,
    inverse: bool = False,
) -> Tensor:
    """x[T, N, H] with every head rotated by its token's position: position_T[t], or t mod s."""
    if position_T is None:
        position_T = torch.arange(len(x_TNH), device=x_TNH.device) % len(cos_sh)
    cos, sin = (table[position_T].unsqueeze(1) for table in (cos_sh, sin_sh))
    out = torch.empty(x_TNH.shape, dtype=cos.dtype, device=cos.device)
    _turn_into(out, x_TNH, torch.cat([cos, cos], -1), sin, -1.0 if inverse else 1.0)
    return out.to(x_TNH.dtype)


def _sequence_blocks(
    x_BskgH: Tensor, cos_sh: Tensor, sin_sh: Tensor
) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
    """(where in the first two dims, cosines, sines) of blocks of about as many elements as above.

    The cosines are repeated for all heads of a group, for long inner loops.
    """
    sequences, length, _, heads, _ = x_BskgH.shape
    each = max(1, math.prod(x_BskgH.shape[2:]))
    elements = _BLOCK_ELEMENTS if x_BskgH.device.type == "cpu" else _LARGE_BLOCK_ELEMENTS
    rows = max(1, elements // each)
    batch = max(1, rows // length)
    for start in range(0, length, rows):
        place = slice(start, start + rows)
        cos_sh11 = cos_sh[place, None, None]
        cos = torch.cat([cos_sh11, cos_sh11], -1).expand(-1, -1, heads, -1).contiguous()
        for first in range(0, sequences, batch):
            yield (slice(first, first + batch), place), cos, sin_sh[place, None, None]


def rotate(qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed heads and rotate queries and keys by their position (RoFormer, half-split form).

    qkv_TkgH: [T, K, N/K + 2, H]; a group holds its query heads, then its key, then its value.
    cos_sh, sin_sh: [s, R/2] with T a multiple of s; token t has position t mod s. The first R
    elements of each head turn, the others are copied.
    Returns q[T, K, N/K, H], k[T, K, 1, H] (new) and v[T, K, 1, H] (a view).
    """
    tokens, groups, packed, head_dim = qkv_TkgH.shape
    queries = packed - 2
    q = qkv_TkgH.new_empty(tokens, groups, queries, head_dim)
    k = qkv_TkgH.new_empty(tokens, groups, 1, head_dim)
    qkv, q_B, k_B = (x.view(-1, len(cos_sh), *x.shape[1:]) for x in (qkv_TkgH, q, k))
    heads = qkv[:, :, :, : queries + 1]
    for at, cos, sin in _sequence_blocks(heads, cos_sh, sin_sh):
        turned = torch.empty(heads[at].shape, dtype=cos.dtype, device=cos.device)
        _turn_into(turned, heads[at], cos, sin, 1.0)
        q_B[at] = turned[:, :, :, :queries]
        k_B[at] = turned[:, :, :, queries:]
    return q, k, qkv_TkgH[:, :, queries + 1 :]


def rotate_grad_(
    dqkv_TkgH: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos_sh: Tensor, sin_sh: Tensor
) -> None:
    """Write the gradient of `rotate` into dqkv[T, K, N/K + 2, H]: rotate back by the same angle."""
    queries = dqkv_TkgH.shape[2] - 2
    dqkv = dqkv_TkgH.view(-1, len(cos_sh), *dqkv_TkgH.shape[1:])
    dq, dk = (x.reshape(-1, len(cos_sh), *x.shape[1:]) for x in (dq, dk))
    heads = dqkv[:, :, :, : queries + 1]
    for at, cos, sin in _sequence_blocks(heads, cos_sh, sin_sh):
        wide = torch.empty(heads[at].shape, dtype=cos.dtype, device=cos.device)
        wide[:, :, :, :queries] = dq[at]
        wide[:, :, :, queries:] = dk[at]
        turned = heads[at] if heads.dtype == wide.dtype else torch.empty_like(wide)
        _turn_into(turned, wide, cos, sin, -1.0)
        if turned.dtype != heads.dtype:
            heads[at] = turned
    dqkv_TkgH[:, :, queries + 1 :].copy_(dv)


# --- cross entropy over a vocabulary shard -------------------------------------------------------


def _smoothing_share(smoothing: float, vocab_size: int | None) -> float:
    """What every token of the vocabulary gets of the label's weight."""
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
    """What a vocabulary shard knows of the loss: [T, 3] = max, sum of exp(x - max), target.

    Columns are tokens first_column ... first_column + num_columns - 1 of the vocabulary; further
    columns are padding and left out. target is the label's logit, 0 where the label lies in another
    shard; with smoothing e over `vocab_size` = V tokens it is (1 - e) times that, plus e / V times
    the sum of the shard's logits. A shard of padding alone gives max = -inf, sum = 0.
    """
    share = _smoothing_share(smoothing, vocab_size)
    dtype = sum_dtype(logits_Tv.dtype)
    stats_T3 = logits_Tv.new_zeros(logits_Tv.shape[0], 3, dtype=dtype)
    if num_columns == 0:
        stats_T3[:, 0] = -torch.inf
        return stats_T3
    maximum_T, sum_T, target_T = stats_T3.unbind(1)
    index_T, owned_T = _owned_columns(label_T, first_column, num_columns)
    target = logits_Tv.gather(1, index_T.unsqueeze(1)).squeeze(1).to(dtype)
    target_T.copy_(target.mul_(1.0 - smoothing).where(owned_T, 0.0))
    for block in _row_blocks(logits_Tv):
        x = logits_Tv[block, :num_columns].to(dtype)
        if smoothing:
            target_T[block].add_(x.sum(1), alpha=share)
        maximum = x.amax(1, keepdim=True)
        maximum_T[block] = maximum.squeeze(1)
        shifted = x - maximum if x.dtype == logits_Tv.dtype else x.sub_(maximum)  # x is a copy
        sum_T[block] = _exp_(shifted).sum(1)
    return stats_T3


def _owned_columns(label_T: Tensor, first_column: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """(column[T] of the label in this shard, any where it is not in it; is it in it[T])."""
    column_T = label_T - first_column
    owned_T = (column_T >= 0) & (column_T < num_columns)
    return column_T.clamp_(0, num_columns - 1), owned_T


def _exp_(x: Tensor) -> Tensor:
    """e^x over x. On CPU by 2^(x log2 e), whose loop is the quicker by up to four times."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return x.mul_(_LOG2_E).exp2_()
    return x.exp_()


IGNORE_INDEX = -100  # torch's own


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

    loss = weight * (lse - target + z_loss * lse^2), 0 where the label is `ignore_index`; without
    labels no token is ignored. vocab_size: labels that are neither below it nor ignored have a
    loss of NaN.
    """
    maximum_rT, sum_rT, target_rT = stats_rT3.unbind(-1)
    maximum_T = maximum_rT.amax(0)
    lse_T = maximum_T + (sum_rT * (maximum_rT - maximum_T).exp()).sum(0).log()
    loss_T = lse_T - target_rT.sum(0)
    if z_loss:
        loss_T = loss_T.addcmul_(lse_T, lse_T, value=z_loss)
    if weight_T is not None:
        loss_T = loss_T.mul_(weight_T)
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
    where the label is `ignore_index`.
    """
    share = _smoothing_share(smoothing, vocab_size)
    if weight_T is not None:
        dloss_T = (dloss_T * weight_T).to(lse_T.dtype)
    scale_T = dloss_T.masked_fill(label_T == ignore_index, 0.0)
    lse_T1 = lse_T.unsqueeze(1)
    factor_T1 = (scale_T * (1.0 + 2.0 * z_loss * lse_T) if z_loss else scale_T).unsqueeze(1)
    if num_columns:
        index_T, owned_T = _owned_columns(label_T, first_column, num_columns)
        index_T1 = index_T.unsqueeze(1)
        hit_T1 = (scale_T * owned_T * (smoothing - 1.0)).unsqueeze(1)
        for block in _row_blocks(logits_Tv):
            x = logits_Tv[block, :num_columns]
            p = x if x.dtype == lse_T.dtype else x.to(lse_T.dtype)
            _exp_(p.sub_(lse_T1[block])).mul_(factor_T1[block])
            if smoothing:
                p.sub_(scale_T[block, None] * share)
            p.scatter_add_(1, index_T1[block], hit_T1[block])
            if p is not x:
                x.copy_(p)
    logits_Tv[:, num_columns:] = 0
    _clear_rows_(logits_Tv, (dloss_T == 0) | (label_T == ignore_index))
    return logits_Tv


def _clear_rows_(dlogits_Tv: Tensor, unused_T: Tensor) -> None:
    """Zeros in rows that weigh nothing, whose logits may be infinite or NaN."""
    if dlogits_Tv.device.type == "cpu":
        dlogits_Tv.index_fill_(0, unused_T.nonzero().flatten(), 0.0)
    else:  # without waiting for their number
        dlogits_Tv.masked_fill_(unused_T.unsqueeze(1), 0.0)


# --- optimizer and casts -------------------------------------------------------------------------


def adamw_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    low: Tensor | None = None,
) -> None:
    """One AdamW update, in place, of flat tensors, as a formula of plain torch operations.

    hyper: [4] on the device = lr, 1 - beta1^t, 1 - beta2^t, factor of the gradient. low: gets the
    new weight in its own type. Computed in weight's type, moments rounded as they are stored.
    """
    lr, bias1, bias2, factor = hyper.to(weight.dtype).unbind()
    g = grad.to(weight.dtype) * factor
    m = (exp_avg.to(weight.dtype) * beta1).add_(g, alpha=1.0 - beta1)
    v = (exp_avg_sq.to(weight.dtype) * beta2).addcmul_(g, g, value=1.0 - beta2)
    weight.sub_(lr * weight_decay * weight)
    weight.sub_(lr / bias1 * (m / (v.sqrt() / bias2.sqrt() + eps)))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if low is not None:
        low.copy_(weight)


def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """saturate(x * scale) in another type; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.to(sum_dtype(x.dtype)) * scale).clamp_(-largest, largest).to(dtype)
