"""What kernels.py compares: each operation of the reference path beside its obvious formula.

Both sides of a pair do forward and backward of the same inputs. Ours is what the layers call:
hand-written gradients, results in place. The composed side is torch's autograd on the formula as
one would write it, in the storage type, with float32 where models have it (norm and loss).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import (
    attention,
    cross_entropy_combine,
    cross_entropy_grad_,
    cross_entropy_stats,
    gelu,
    gelu_grad,
    layer_norm,
    layer_norm_grad,
    rms_norm,
    rms_norm_grad,
    rope_tables,
    rotate,
    rotate_grad_,
    swiglu,
    swiglu_grad,
)
from megalite.kernels.adamw_operations import AdamWRun, AdamWSettings
from megalite.kernels.plain.adamw import FusedAdamW

EPS, LR, DECAY = 1e-5, 3e-4, 0.1
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Sizes:
    """A model and a microbatch of it: T tokens in documents of L."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tokens: int
    document: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Pair:
    """One operation; `count`: how often a training step of one microbatch does it."""

    name: str
    count: int
    in_sum: bool  # norm + SwiGLU + CE + AdamW
    ours: Callable[[], object]
    composed: Callable[[], object]
    compiled: Callable[[], object] | None = None


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def backward(forward: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> object:
    """Forward and backward by autograd."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = forward(*leaves)
    return torch.autograd.grad(out, leaves, dout.to(out.dtype))


def norm_pair(sizes: Sizes, dtype: torch.dtype, quick: bool) -> Pair:
    x, dy = (draw(sizes.tokens, sizes.hidden, dtype=dtype, seed=i) for i in (0, 1))
    weight = draw(sizes.hidden, dtype=dtype, seed=2)

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * wide.to(x.dtype)

    def ours() -> object:
        _, rstd = rms_norm(x, weight, EPS)
        return rms_norm_grad(dy, x, weight, rstd)

    return _pair("norm", 2 * sizes.layers + 1, True, ours, formula, [x, weight], dy, quick)


def swiglu_pair(sizes: Sizes, dtype: torch.dtype, quick: bool, widened: bool = False) -> Pair:
    """Ours writes the gradient over h, so each side starts from a copy, as a product would make.

    widened: the formula with the intermediates in float32, too, as ours has them.
    """
    h, da = (draw(sizes.tokens, n * sizes.ffn, dtype=dtype, seed=n) for n in (2, 1))

    def formula(h: Tensor) -> Tensor:
        work = h.clone()
        gate, up = (work.float() if widened else work).chunk(2, -1)
        return (F.silu(gate) * up).to(dtype)

    def ours() -> object:
        work = h.clone()
        return swiglu(work), swiglu_grad(da, work)[0]

    name = "swiglu beside float32" if widened else "swiglu"
    return _pair(name, sizes.layers, not widened, ours, formula, [h], da, quick)


def gelu_pair(sizes: Sizes, dtype: torch.dtype, quick: bool) -> Pair:
    """As `swiglu_pair`: each side starts from a copy of h."""
    h, da = (draw(sizes.tokens, 4 * sizes.hidden, dtype=dtype, seed=seed) for seed in (2, 1))

    def formula(h: Tensor) -> Tensor:
        return F.gelu(h.clone(), approximate="tanh")

    def ours() -> object:
        work = h.clone()
        return gelu(work), gelu_grad(da, work)[0]

    return _pair("gelu", sizes.layers, False, ours, formula, [h], da, quick)


def layer_norm_pair(sizes: Sizes, dtype: torch.dtype, quick: bool) -> Pair:
    x, dy = (draw(sizes.tokens, sizes.hidden, dtype=dtype, seed=i) for i in (0, 1))
    weight, bias = (draw(sizes.hidden, dtype=dtype, seed=i) for i in (2, 3))

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (sizes.hidden,), weight, bias, EPS)

    def ours() -> object:
        _, mean, rstd = layer_norm(x, weight, bias, EPS)
        return layer_norm_grad(dy, x, weight, mean, rstd)

    return _pair(
        "layer_norm", 2 * sizes.layers + 1, False, ours, formula, [x, weight, bias], dy, quick
    )


def loss_pair(sizes: Sizes, dtype: torch.dtype, quick: bool) -> Pair:
    """Ours overwrites the logits, so each side starts from a copy, as the product would make."""
    logits = draw(sizes.tokens, sizes.vocab, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(0, sizes.vocab, (sizes.tokens,), generator=generator)
    dloss = torch.full((sizes.tokens,), 1.0 / sizes.tokens)

    def ours() -> object:
        work = logits.clone()
        stats = cross_entropy_stats(work, label, 0, sizes.vocab)
        loss, lse = cross_entropy_combine(stats[None])
        return loss, cross_entropy_grad_(work, label, lse, dloss, 0, sizes.vocab)

    def formula(x: Tensor) -> Tensor:
        return F.cross_entropy(x.clone().float(), label, reduction="none")

    return _pair("cross_entropy", 1, True, ours, formula, [logits], dloss, quick)


def rope_pair(sizes: Sizes, dtype: torch.dtype, quick: bool) -> Pair:
    group = sizes.heads // sizes.kv_heads
    packed = draw(sizes.tokens, sizes.kv_heads, group + 2, sizes.head, dtype=dtype)
    dout = draw(sizes.tokens, sizes.kv_heads, group + 2, sizes.head, dtype=dtype, seed=1)
    cos, sin = rope_tables(sizes.document, sizes.head, 1e4, torch.float32, packed.device)
    repeats = sizes.tokens // sizes.document
    wide = [torch.cat([t, t], -1).repeat(repeats, 1)[:, None, None].to(dtype) for t in (cos, sin)]

    def formula(x: Tensor) -> Tensor:
        heads, value = x[:, :, :-1], x[:, :, -1:]
        first, second = heads.chunk(2, -1)
        turned = heads * wide[0] + torch.cat([-second, first], -1) * wide[1]
        return torch.cat([turned, value], 2)

    def ours() -> object:
        q, k, v = rotate(packed, cos, sin)
        dqkv = torch.empty_like(packed)
        parts = dout[:, :, :group], dout[:, :, group : group + 1], dout[:, :, group + 1 :]
        rotate_grad_(dqkv, *parts, cos, sin)
        return q, k, v, dqkv

    return _pair("rope", sizes.layers, False, ours, formula, [packed], dout, quick)


def attention_pair(sizes: Sizes, dtype: torch.dtype, quick: bool) -> Pair:
    """Ours goes by documents; the formula has all scores and masks those of other documents."""
    shapes = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    leaves = [draw(sizes.tokens, n, sizes.head, dtype=dtype, seed=i) for i, n in enumerate(shapes)]
    dout = draw(sizes.tokens, sizes.heads, sizes.head, dtype=dtype, seed=3)
    boundaries = list(range(0, sizes.tokens + 1, sizes.document))
    token = torch.arange(sizes.tokens)
    same = (token // sizes.document)[:, None] == (token // sizes.document)[None, :]
    seen = same & (token[:, None] >= token[None, :])

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(sizes.heads // sizes.kv_heads, 1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        scores = (q @ k.mT) * sizes.head**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out: Tensor = (weights @ v).transpose(0, 1)
        return out

    def ours() -> object:
        return backward(lambda q, k, v: attention(q, k, v, boundaries), leaves, dout)

    return _pair("attention", sizes.layers, False, ours, formula, leaves, dout, quick)


def parameter_shapes(sizes: Sizes) -> list[tuple[int, ...]]:
    """Of a Llama of these sizes."""
    qkv = (sizes.heads + 2 * sizes.kv_heads) * sizes.head
    hidden, ffn, table = sizes.hidden, sizes.ffn, (sizes.vocab, sizes.hidden)
    layer = [(qkv, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn), (hidden,)]
    return [table, *([*layer, (hidden,)] * sizes.layers), (hidden,), table]


def adamw_pair(sizes: Sizes, fused: bool = False) -> Pair:
    """Ours updates one flat tensor; torch's optimizer a list of parameters, float32 both."""
    shapes = parameter_shapes(sizes)
    parameters = [torch.nn.Parameter(draw(*shape, dtype=torch.float32)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    theirs = torch.optim.AdamW(
        parameters, LR, BETAS, EPS, DECAY, fused=True if fused else None
    )  # by default a loop over the parameters on CPU
    weight = torch.cat([parameter.detach().flatten() for parameter in parameters])
    grad = torch.full_like(weight, 1e-3)
    m, v = (torch.zeros_like(weight) for _ in range(2))
    run = AdamWRun(weight, grad, m, v, weight_decay=DECAY)
    plan = FusedAdamW([run], AdamWSettings(*BETAS, EPS))
    step = iter(range(1, 1 << 30))

    def ours() -> object:
        plan.update(LR, next(step), 1.0)
        return weight

    def composed() -> object:
        theirs.step()
        return parameters

    return Pair("adamw beside fused" if fused else "adamw", 1, not fused, ours, composed)


def _pair(
    name: str,
    count: int,
    in_sum: bool,
    ours: Callable[[], object],
    formula: Callable[..., Tensor],
    leaves: list[Tensor],
    dout: Tensor,
    quick: bool,
) -> Pair:
    """quick: with torch.compile of the formula, too."""
    compiled = None
    if quick:
        faster = torch.compile(formula, dynamic=False)
        compiled = lambda: backward(faster, leaves, dout)  # noqa: E731
    return Pair(name, count, in_sum, ours, lambda: backward(formula, leaves, dout), compiled)


def all_pairs(sizes: Sizes, dtype: torch.dtype, quick: bool) -> list[Pair]:
    makers = (
        norm_pair,
        swiglu_pair,
        loss_pair,
        rope_pair,
        attention_pair,
        layer_norm_pair,
        gelu_pair,
    )
    pairs = [make(sizes, dtype, quick) for make in makers]
    if dtype != torch.float32:
        pairs.append(swiglu_pair(sizes, dtype, quick, widened=True))
    return [*pairs, adamw_pair(sizes), adamw_pair(sizes, fused=True)]
