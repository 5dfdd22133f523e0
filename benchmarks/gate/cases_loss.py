"""The cases of loss and optimizer: cross entropy of two shards, AdamW, sum of squares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gate.cases import FLAT, Case, Shape, Shapes, grads, leaf, times_bytes
from benchmarks.gate.device import Gate, Inputs
from megalite.kernels.triton.adamw import adamw_, sum_squares
from megalite.kernels.triton.cross_entropy import (
    cross_entropy_combine,
    cross_entropy_grad_,
    cross_entropy_stats,
)

Z_LOSS, SMOOTHING = 1e-4, 0.1
BETA1, BETA2, ADAM_EPS, DECAY, LR = 0.9, 0.95, 1e-8, 0.1, 3e-4


def make_logits(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    tokens, vocab = shape["T"], shape["V"]
    logits = gate.draw(tokens, vocab, dtype=dtype, seed=seed).mul_(3)
    label = gate.integers(vocab, tokens, seed=seed)
    label[::7] = -100
    dloss = torch.full((tokens,), 1 / tokens, device=gate.device)
    lse = torch.logsumexp(logits[:1].float(), 1).expand(tokens).contiguous()
    return {"logits": logits, "label": label, "dloss": dloss, "lse": lse}


def _losses(x: Tensor, label: Tensor) -> Tensor:
    """With z-loss and smoothing; 0 where ignored."""
    loss = F.cross_entropy(x, label, reduction="none", label_smoothing=SMOOTHING)
    return (loss + Z_LOSS * torch.logsumexp(x, 1).square()).where(label >= 0, 0.0)


def run_loss(i: Inputs) -> Sequence[Tensor]:
    """Statistics of two shards, merged, and the gradient of both in place."""
    vocab = i["logits"].shape[1]
    cut = vocab // 2 // 16 * 16
    parts = [(i["logits"][:, :cut], 0), (i["logits"][:, cut:], cut)]
    extras = {"smoothing": SMOOTHING, "vocab_size": vocab}
    stats = torch.stack(
        [cross_entropy_stats(x, i["label"], at, x.shape[1], **extras) for x, at in parts]
    )
    loss, lse = cross_entropy_combine(stats, i["label"], z_loss=Z_LOSS)
    for x, at in parts:
        cross_entropy_grad_(x, i["label"], lse, i["dloss"], at, x.shape[1], z_loss=Z_LOSS, **extras)
    return [loss, lse, i["logits"]]


def want_loss(i: Inputs) -> Sequence[Tensor]:
    x = leaf(i["logits"])
    loss = _losses(x, i["label"])
    (dx,) = grads([loss], [i["dloss"]], [x])
    return [loss.detach(), torch.logsumexp(x.detach(), 1), dx]


def run_stats(i: Inputs) -> Sequence[Tensor]:
    logits = i["logits"]
    stats = cross_entropy_stats(logits, i["label"], 0, logits.shape[1])
    return cross_entropy_combine(stats[None], i["label"])


def want_stats(i: Inputs) -> Sequence[Tensor]:
    x = i["logits"].double()
    loss = F.cross_entropy(x, i["label"], reduction="none")
    return [loss, torch.logsumexp(x, 1)]


def run_grad(i: Inputs) -> Sequence[Tensor]:
    logits = i["logits"]
    return [cross_entropy_grad_(logits, i["label"], i["lse"], i["dloss"], 0, logits.shape[1])]


def want_grad(i: Inputs) -> Sequence[Tensor]:
    x, used = i["logits"].double(), (i["label"] >= 0)[:, None]
    hit = F.one_hot(i["label"].clamp_min(0), x.shape[1])
    dx = ((x - i["lse"].double()[:, None]).exp() - hit) * i["dloss"].double()[:, None]
    return [dx.where(used, 0.0)]


def make_adamw(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    """dtype is that of the gradient."""
    n = shape["n"]
    weight, m, v = (gate.draw(n, seed=4 * seed + k) for k in range(3))
    hyper = torch.tensor([LR, 1 - BETA1**3, 1 - BETA2**3, 0.5], device=gate.device)
    grad = gate.draw(n, dtype=dtype, seed=4 * seed + 3)
    return {"weight": weight, "grad": grad, "m": m.mul_(0.1), "v": v.square_(), "hyper": hyper,
            "low": torch.empty(n, dtype=torch.bfloat16, device=gate.device)}  # fmt: skip


def run_adamw(i: Inputs) -> Sequence[Tensor]:
    adamw_(
        i["weight"], i["grad"], i["m"], i["v"], i["hyper"], low=i["low"],
        beta1=BETA1, beta2=BETA2, eps=ADAM_EPS, weight_decay=DECAY,
    )  # fmt: skip
    return [i["weight"], i["m"], i["v"]]


def check_adamw(i: Inputs) -> Sequence[Tensor]:
    """Also whether the copy is the rounded weight, bit for bit."""
    weight, m, v = run_adamw(i)
    return [weight, m, v, i["low"] == weight.to(i["low"].dtype)]


def want_adamw(i: Inputs) -> Sequence[Tensor]:
    w, g, m, v = (i[name].double() for name in ("weight", "grad", "m", "v"))
    lr, bias1, bias2, clip = i["hyper"].double().unbind()
    g = g * clip
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = w * (1 - lr * DECAY) - lr / bias1 * m / (v.sqrt() / bias2.sqrt() + ADAM_EPS)
    return [w, m, v, torch.ones_like(w, dtype=torch.bool)]


def adamw_bytes(i: Inputs) -> float:
    """Weight and both moments read and written, the gradient read, the copy written."""
    n = i["weight"].numel()
    return float(n * (6 * 4 + i["grad"].element_size() + i["low"].element_size()))


def make_flat(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    return {"x": gate.draw(shape["n"], dtype=dtype, seed=seed)}


def run_squares(i: Inputs) -> Sequence[Tensor]:
    return [sum_squares(i["x"], i["x"].new_empty(1, dtype=torch.float32))]


LOGITS = Shapes(
    checked=[{"T": 37, "V": 1003}, {"T": 257, "V": 32000}, {"T": 512, "V": 128256}],
    timed={"T": 8192, "V": 128256},
    dry=[{"T": 3, "V": 77}],
)
BOTH = (torch.bfloat16, torch.float32)
CASES = [
    Case("cross_entropy", "loss", make_logits, run_stats, want_stats, times_bytes("logits", 1),
         LOGITS),
    Case("cross_entropy_grad", "loss", make_logits, run_grad, want_grad, times_bytes("logits", 2),
         LOGITS, backward=True),
    Case("cross_entropy_shards", "loss", make_logits, run_loss, want_loss, times_bytes("logits", 3),
         LOGITS, backward=True),
    Case("adamw", "adamw", make_adamw, run_adamw, want_adamw, adamw_bytes, FLAT, check=check_adamw,
         dtypes=BOTH),
    Case("sum_squares", "elementwise", make_flat, run_squares,
         lambda i: [i["x"].double().square().sum()[None]],
         lambda i: float(i["x"].numel() * i["x"].element_size()), FLAT, dtypes=BOTH),
]  # fmt: skip
