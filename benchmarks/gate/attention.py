"""The cases of attention: every head dim, documents, windows, groups, both directions, dropout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gate.cases import Case, Shape, Shapes, grads, leaf
from benchmarks.gate.device import Gate, Inputs
from megalite.kernels import dropout_mask
from megalite.kernels.plain.intervals import Intervals, document_intervals
from megalite.kernels.triton.attention import attention_delta, attention_forward
from megalite.kernels.triton.attention_backward import attention_backward
from megalite.kernels.triton.attention_tiles import Drop

DROP = Drop(0.1, (0x12345678, 0x9ABCDEF0), 3, 3, 1)
# B: documents of equal length; docs: of unequal length instead; W: window, 0 none; C: causal
SMALL = {"T": 333, "B": 0, "N": 4, "K": 1, "W": 0, "C": 1, "p": 0}


def make(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    tokens, heads, kv_heads, head_dim = (shape[name] for name in ("T", "N", "K", "H"))
    q, do = (gate.draw(tokens, heads, head_dim, dtype=dtype, seed=4 * seed + i) for i in (0, 1))
    k, v = (gate.draw(tokens, kv_heads, head_dim, dtype=dtype, seed=4 * seed + i) for i in (2, 3))
    stops = torch.tensor(boundaries(tokens, shape["B"]), device=gate.device)
    window = shape["W"] or None
    mask = document_intervals(stops, tokens, causal=bool(shape["C"]), window=window)
    drop = DROP if shape["p"] else None
    inputs: Inputs = {"q": q, "k": k, "v": v, "do": do, "mask": mask, "drop": drop}
    return inputs | {"shape": dict(shape)}


def boundaries(tokens: int, documents: int) -> list[int]:
    """Equal documents, or (0) a one-token document, a third, the rest."""
    if documents:
        return list(range(0, tokens + 1, tokens // documents))
    return [0, 1, max(2, tokens // 3), tokens]


def make_backward(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    i = make(gate, shape, dtype, seed)
    o, lse = run(i)
    return {**i, "o": o, "lse": lse}


def run(i: Inputs) -> Sequence[Tensor]:
    return attention_forward(i["q"], i["k"], i["v"], i["mask"], drop=i["drop"])


def run_backward(i: Inputs) -> Sequence[Tensor]:
    stats = attention_delta(i["o"], i["do"], i["lse"])
    return attention_backward(i["do"], i["q"], i["k"], i["v"], stats, i["mask"], drop=i["drop"])


def attend64(
    q: Tensor, k: Tensor, v: Tensor, mask: Intervals, drop: Drop | None
) -> tuple[Tensor, Tensor]:
    """(o[T, N, H], lse[N, T]) with all scores at once."""
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * head_dim**-0.5
    j = torch.arange(k.shape[1], device=q.device)
    seen = (j >= mask.lo[:, None]) & (j < mask.up[:, None])
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse[..., None]).exp()
    if drop is not None:
        i = torch.arange(tokens, device=q.device)[:, None] + drop.first_query
        plane = torch.arange(heads, device=q.device)[:, None, None] + drop.first_head
        keep = dropout_mask(drop.key, drop.p, i, j + drop.first_key, plane)
        weights = weights * keep / (1 - drop.p)
    return (weights @ v).transpose(0, 1), lse


def want(i: Inputs) -> Sequence[Tensor]:
    q, k, v = (i[name].double() for name in ("q", "k", "v"))
    return list(attend64(q, k, v, i["mask"], i["drop"]))


def want_backward(i: Inputs) -> Sequence[Tensor]:
    q, k, v = (leaf(i[name]) for name in ("q", "k", "v"))
    o, _ = attend64(q, k, v, i["mask"], i["drop"])
    return grads([o], [i["do"]], [q, k, v])


def flops(i: Inputs) -> float:
    """Two products over the pairs that the mask leaves, with half of the diagonal's share."""
    shape: Shape = i["shape"]
    length = shape["T"] // max(1, shape["B"])
    full = 4.0 * shape["T"] * length * shape["N"] * shape["H"]
    return full / 2 if shape["C"] else full


def backward_flops(i: Inputs) -> float:
    """Five products, as others count it; the two kernels here do seven."""
    return 2.5 * flops(i)


def cases(
    head_dim: int, changes: dict[str, int], label: str, dtypes: Sequence[torch.dtype]
) -> list[Case]:
    """Both directions at a head dim: small and odd, two documents, one long one."""
    small = {**SMALL, "H": head_dim, **changes}
    checked = [small, {**small, "T": 1024, "B": 2, "N": 8, "K": 2},
               {**small, "T": 2048, "B": 1, "N": 4, "K": 4}]  # fmt: skip
    timed = {"T": 8192, "B": 1, "N": 32, "K": 8, "H": head_dim, "W": 0, "C": 1, "p": 0} | changes
    dry = [{**small, "T": 37, "N": 2}]
    shapes = Shapes(checked, timed, dry)
    name = f"attention {head_dim}{label}"
    return [
        Case(name, f"attention forward {head_dim}{label}", make, run, want, flops, shapes,
             dtypes=dtypes),
        Case(f"{name} grad", f"attention backward {head_dim}{label}", make_backward, run_backward,
             want_backward, backward_flops, shapes, backward=True, dtypes=dtypes),
    ]  # fmt: skip


ALL = (torch.bfloat16, torch.float16, torch.float32)
BF16 = (torch.bfloat16,)
CASES: list[Case] = [
    *cases(128, {}, "", ALL),
    *cases(64, {}, "", ALL),
    *cases(128, {"W": 200}, " window", BF16),
    *cases(128, {"C": 0}, " both ways", BF16),
    *cases(128, {"p": 1}, " dropout", BF16),
    *cases(256, {}, "", BF16),
    *cases(96, {}, "", BF16),
    *cases(80, {}, "", ALL),
    *cases(32, {}, "", BF16),
    *cases(16, {}, "", ALL),
]
TIMED = {"attention 128", "attention 64", "attention 128 dropout", "attention 256", "attention 96"}
