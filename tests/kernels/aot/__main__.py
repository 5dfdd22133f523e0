"""The static table: what each shipped kernel compiles to, at the shapes of an 8B Llama.

python -m tests.kernels.aot                      rows for sm_90 as JSON lines
python -m tests.kernels.aot --capability 80 100  other architectures
python -m tests.kernels.aot --write              replace this Triton's committed rows
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from megalite.kernels.plain.intervals import document_intervals
from megalite.kernels.triton import adamw as adamw
from megalite.kernels.triton import attention as attention
from megalite.kernels.triton import cross_entropy as loss
from megalite.kernels.triton import gelu as gelu
from megalite.kernels.triton import grouped_gemm as grouped
from megalite.kernels.triton import moe_permute as moe
from megalite.kernels.triton import norm as norm
from megalite.kernels.triton.attention_backward import attention_backward
from megalite.kernels.triton.attention_tiles import Drop
from megalite.kernels.triton.cast import scale_cast
from megalite.kernels.triton.dropout import dropout
from megalite.kernels.triton.embedding import embedding_grad_
from megalite.kernels.triton.rope import rotate, rotate_grad_
from megalite.kernels.triton.swiglu import geglu, geglu_grad, swiglu_grad
from megalite.kernels.triton.swiglu import swiglu as gated
from tests import ROOT
from tests.kernels.aot.kit import describe, recording

TABLE = ROOT / "benchmarks" / "results" / "static_sm90.jsonl"
TOKENS = 256  # a run-time value: kernels do not depend on it, nothing is computed
BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def rms_norm(columns: int) -> None:
    x, weight = empty(TOKENS, columns), empty(columns)
    _, s, _, rstd = norm.norm(x, weight, None, 1e-5, x)
    _, dweights, _ = norm.norm_grad(x, s, weight, None, rstd, x)
    norm.add_column_sums_(empty(columns, dtype=torch.float32), dweights)


def layer_norm(columns: int) -> None:
    x, weight = empty(TOKENS, columns), empty(columns)
    _, s, mean, rstd = norm.norm(x, weight, weight, 1e-5, x)
    norm.norm_grad(x, s, weight, mean, rstd, x)


def swiglu() -> None:
    h, a = empty(TOKENS, 2 * 14336), empty(TOKENS, 14336)
    gated(h)
    swiglu_grad(a, h)


def bias_gelu() -> None:
    h, bias = empty(TOKENS, 14336), empty(14336)
    gelu.gelu(h, bias)
    gelu.gelu_backward_(h, h, bias)


def rope() -> None:
    packed = empty(TOKENS, 8, 6, 128)
    table = empty(TOKENS, 64, dtype=torch.float32)
    rotate(packed, table, table, copy_values=True)
    rotate_grad_(packed, packed[:, :, :4], packed[:, :, 4:5], packed[:, :, 5:], table, table)


def embedding() -> None:
    rows = torch.zeros(TOKENS, dtype=torch.int64)
    embedding_grad_(empty(64, 4096, dtype=torch.float32), empty(TOKENS, 4096), rows)


def drop() -> None:
    dropout(empty(TOKENS, 4096), (1, 2), 0.1)


def cross_entropy() -> None:
    logits = empty(TOKENS, 128256)
    label = torch.zeros(TOKENS, dtype=torch.int64)
    stats = loss.cross_entropy_stats(logits, label, 0, 128256)
    losses, lse = loss.cross_entropy_combine(stats[None], label)
    loss.cross_entropy_grad_(logits, label, lse, losses, 0, 128256)


def adamw_update(grads: torch.dtype) -> None:
    length = 1 << 16
    weight, state = (empty(length, dtype=torch.float32) for _ in range(2))
    adamw.adamw_(
        weight,
        empty(length, dtype=grads),
        state,
        state,
        empty(4, dtype=torch.float32),
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        low=empty(length),
    )
    adamw.sum_squares(empty(length, dtype=grads), empty(1, dtype=torch.float32))


def cast(dtype: torch.dtype) -> None:
    x = empty(1 << 16, dtype=torch.float32)
    scale_cast(x, empty(1, dtype=torch.float32), dtype)


def attend(head_dim: int, drop: Drop | None = None, tokens: int = TOKENS, splits: int = 1) -> None:
    q, k = empty(tokens, 8, head_dim), empty(tokens, 2, head_dim)
    mask = document_intervals(torch.tensor([0, tokens]), tokens)
    o, lse = attention.attention_forward(q, k, k, mask, drop=drop)
    stats = attention.attention_delta(o, q, lse)
    attention_backward(q, q, k, k, stats, mask, drop=drop, splits=splits)


def experts(tokens: int, copies: int, num_experts: int, columns: int) -> None:
    expert = torch.zeros(tokens, copies, dtype=torch.int64)
    rows = moe.expert_rows(expert, num_experts)
    x, weight = empty(tokens, columns), empty(tokens, copies, dtype=torch.float32)
    y = moe.permute(x, rows)
    moe.unpermute(y, rows, weight)
    moe.unpermute_grad(x, y, rows, weight)


def grouped_gemm(num_experts: int, rows: int, columns: int, inner: int) -> None:
    weight, grad = (empty(num_experts, columns, inner, dtype=x) for x in (BF16, torch.float32))
    x, dy = empty(rows, inner), empty(rows, columns)
    offset = torch.zeros(num_experts + 1, dtype=torch.int32)
    grouped.grouped_linear(x, weight, offset)
    grouped.grouped_linear_input_grad(dy, weight, offset)
    grouped.grouped_weight_grad_(grad, dy, x, offset)


def grouped_gemm_by_pointers() -> None:
    """The form with the most registers of those without descriptors."""
    offset, dy = torch.zeros(9, dtype=torch.int32), empty(TOKENS, 768)
    grouped.grouped_linear_input_grad(dy, empty(8, 768, 2048), offset, tma=False)


def one_expert() -> None:
    experts(1, 1, 1, 64)
    grouped_gemm(1, 1, 64, 64)


def one_token() -> None:
    """Sizes of 1 reach a kernel as constants instead of values."""
    x, weight = empty(1, 256), empty(256)
    _, s, _, rstd = norm.norm(x, weight, None, 1e-5)
    norm.norm_grad(x, s, weight, None, rstd)
    swiglu_grad(gated(x), x)
    geglu_grad(geglu(x), x)
    geglu_grad(geglu(x, erf=True), x, True, erf=True)
    gelu.relu2_grad(gelu.relu2(x), x)
    gelu.gelu_backward_(x, x, weight)
    table = empty(1, 8, dtype=torch.float32)
    rotate(empty(1, 1, 3, 16), table, table)
    dropout(x, (0, 1), 0.5, 1)
    label = torch.zeros(1, dtype=torch.int64)
    embedding_grad_(empty(1, 256, dtype=torch.float32), x, label)
    stats = loss.cross_entropy_stats(x, label, 1, 1)
    losses, lse = loss.cross_entropy_combine(stats[None], label)
    loss.cross_entropy_grad_(x, label, lse, losses, 1, 1)
    attend(16, tokens=1)
    weight, offset = empty(1, 1, 1, dtype=torch.float32), torch.zeros(2, dtype=torch.int32)
    grouped.grouped_linear(weight[0], weight, offset)
    grouped.grouped_linear_input_grad(weight[0], weight, offset)
    grouped.grouped_weight_grad_(weight, weight[0], weight[0], offset)


CASES: dict[str, Callable[[], None]] = {
    "rms_norm 4096": lambda: rms_norm(4096),
    "rms_norm 8192": lambda: rms_norm(8192),
    "rms_norm 16384": lambda: rms_norm(16384),
    "layer_norm 4096": lambda: layer_norm(4096),
    "swiglu": swiglu,
    "gelu": bias_gelu,
    "rope": rope,
    "embedding": embedding,
    "dropout": drop,
    "cross_entropy": cross_entropy,
    "adamw bf16 gradients": lambda: adamw_update(BF16),
    "adamw fp32 gradients": lambda: adamw_update(torch.float32),
    "cast bf16": lambda: cast(BF16),
    "cast e4m3": lambda: cast(torch.float8_e4m3fn),
    "attention 64": lambda: attend(64),
    "attention 96": lambda: attend(96),
    "attention 128": lambda: attend(128),
    "attention 128 dropout": lambda: attend(128, drop=Drop(0.1, (1, 2), 0, 0)),
    "attention 128 split": lambda: attend(128, splits=4),
    "attention 256": lambda: attend(256),
    "experts": lambda: experts(TOKENS, 8, 128, 2048),
    "grouped gemm": lambda: grouped_gemm(8, TOKENS, 768, 2048),
    "grouped gemm by pointers": grouped_gemm_by_pointers,
}
EDGES: dict[str, Callable[[], None]] = {"one token": one_token, "one expert": one_expert}
# What every other architecture must compile: each kernel once.
PORTABLE = [
    "rms_norm 16384",
    "swiglu",
    "gelu",
    "rope",
    "embedding",
    "dropout",
    "cross_entropy",
    "adamw bf16 gradients",
    "cast bf16",
    "attention 128 split",
    "one expert",
]


def rows(capability: int, part: slice) -> Iterator[dict[str, Any]]:
    """One row a kernel, in the order of the cases; `part` is of the cases."""
    names = list(CASES) if capability == 90 else PORTABLE
    if capability == 80:
        names = list(dict.fromkeys([*names, *EDGES]))
    for name in names[part]:
        with recording(capability) as recorder:
            {**CASES, **EDGES}[name]()
        for kernel in recorder.kernels:
            yield {
                "triton": triton.__version__,
                "arch": f"sm_{capability}",
                "case": name,
                "kernel": kernel.metadata.name.strip("_"),
                **(describe(kernel) if capability == 90 else {}),
            }


def committed() -> list[dict[str, Any]]:
    """Rows of the committed table, of every Triton version in it."""
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--part", type=int, default=0, help="of --parts, this one's cases only")
    parser.add_argument("--parts", type=int, default=1)
    arguments = parser.parse_args()
    part = slice(arguments.part, None, arguments.parts)
    found = []
    for capability in arguments.capability:
        for row in rows(capability, part):
            print(json.dumps(row), flush=True)
            found.append(row)
    if arguments.write:
        kept = [x for x in committed() if x["triton"] != triton.__version__]
        lines = sorted([*kept, *found], key=lambda x: str(x["triton"]))
        TABLE.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
