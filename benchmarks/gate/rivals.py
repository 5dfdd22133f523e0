"""What gpu_gate times beside our kernels: torch eager and compiled, SDPA, fused AdamW, Liger.

A rival is made from the inputs of a case and called on any set of them. What is not there raises,
and its row says so. Nothing of ours is imported here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Inputs = dict[str, Any]
Call = Callable[[Inputs], object]
EPS = 1e-5


def eager(forward: Callable[..., object], *names: str) -> Callable[[bool], Call]:
    return lambda dry: lambda i: forward(*(i[name] for name in names))


def compiled(forward: Callable[..., object], *names: str) -> Callable[[bool], Call]:
    def make(dry: bool) -> Call:
        quick = _compile(forward, dry)
        return lambda i: quick(*(i[name] for name in names))

    return make


def _compile(forward: Callable[..., Any], dry: bool) -> Callable[..., Any]:
    torch.compiler.reset()
    backend = "eager" if dry else "inductor"
    quick: Callable[..., Any] = torch.compile(forward, dynamic=False, backend=backend)
    return quick


def backward(
    forward: Callable[..., Tensor], leaves: Sequence[str], dout: str, *others: str
) -> Callable[[bool], Call]:
    """Autograd's backward alone: the graph of a set of inputs is made in its first call."""
    return lambda dry: _backward(forward, leaves, dout, others)


def compiled_backward(
    forward: Callable[..., Tensor], leaves: Sequence[str], dout: str, *others: str
) -> Callable[[bool], Call]:
    return lambda dry: _backward(_compile(forward, dry), leaves, dout, others)


def _backward(
    forward: Callable[..., Tensor], leaves: Sequence[str], dout: str, others: Sequence[str]
) -> Call:
    key = f"graph {id(forward)}"

    def call(i: Inputs) -> object:
        if key not in i:
            made = [i[name].detach().requires_grad_() for name in leaves]
            i[key] = forward(*made, *(i[name] for name in others)), made
        out, made = i[key]
        return torch.autograd.grad(out, made, i[dout], retain_graph=True)

    return call


# --- composed operations -------------------------------------------------------------------------


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return F.rms_norm(s, weight.shape, weight, EPS), s


def rms_norm(s: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(s, weight.shape, weight, EPS)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    s = x + residual
    return F.layer_norm(s, weight.shape, weight, bias, EPS), s


def layer_norm(s: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(s, weight.shape, weight, bias, EPS)


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, 1)
    return F.silu(gate) * up


def gelu(h: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(h + bias, approximate="tanh")


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x[:, :, :-1].chunk(2, -1)
    if len(cos) != len(x):
        cos, sin = (table.repeat(len(x) // len(table), 1) for table in (cos, sin))
    cos, sin = (table[:, None, None, :].to(x.dtype) for table in (cos, sin))
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned, x[:, :, -1:].clone()


def loss(logits: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits, label, reduction="none")


def loss_and_grad(i: Inputs) -> object:
    logits = i["logits"].detach().requires_grad_()
    return torch.autograd.grad(loss(logits, i["label"]).float(), logits, i["dloss"])


def fused_adamw(dry: bool) -> Call:
    """torch's fused kernel on one flat tensor, and the copy to 16 bits."""

    def call(i: Inputs) -> object:
        if "optimizer" not in i:
            parameter = torch.nn.Parameter(i["weight"].clone())
            parameter.grad = i["grad"].float()
            i["optimizer"] = torch.optim.AdamW([parameter], fused=True), parameter
        optimizer, parameter = i["optimizer"]
        optimizer.step()
        return i["low"].copy_(parameter.detach())

    return call


def grouped_product(dry: bool) -> Call:
    product = F.grouped_mm
    return lambda i: product(i["x"], i["weight"].mT, offs=i["offset"][1:])


# --- attention -----------------------------------------------------------------------------------


def sdpa(kind: SDPBackend, grad: bool, impl: str | None = None) -> Callable[[bool], Call]:
    """torch's attention on one kernel; impl: a flash-attention package that torch can switch to."""

    def forward(q: Tensor, k: Tensor, v: Tensor, shape: Mapping[str, int]) -> Tensor:
        batch = (x.unflatten(0, (max(1, shape["B"]), -1)).transpose(1, 2) for x in (q, k, v))
        query, key, value = batch
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=bool(shape["C"]), enable_gqa=q.shape[1] != k.shape[1],
                dropout_p=0.1 if shape["p"] else 0.0,
            ).transpose(1, 2).flatten(0, 1)  # fmt: skip

    def make(dry: bool) -> Call:
        attention = torch.nn.attention
        if impl is not None:
            attention.activate_flash_attention_impl(impl)
        elif hasattr(attention, "restore_flash_attention_impl"):
            attention.restore_flash_attention_impl(_raise_warn=False)
        if grad:
            return _backward(forward, ("q", "k", "v"), "do", ("shape",))
        return lambda i: forward(i["q"], i["k"], i["v"], i["shape"])

    return make


def attention_rivals(grad: bool) -> dict[str, Callable[[bool], Call]]:
    return {
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION, grad),
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, grad),
        "sdpa FA3": sdpa(SDPBackend.FLASH_ATTENTION, grad, "FA3"),
    }


# --- Liger ---------------------------------------------------------------------------------------


def liger(module: str, function: str, *arguments: Any) -> Callable[[bool], Call]:
    """Forward of an autograd Function of liger_kernel.ops; strings name inputs."""

    def make(dry: bool) -> Call:
        apply = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply
        return lambda i: apply(*(i[x] if isinstance(x, str) and x in i else x for x in arguments))

    return make


def liger_swiglu(dry: bool) -> Call:
    apply = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    return lambda i: apply(*(x.contiguous() for x in i["h"].chunk(2, 1)))


RIVALS: dict[str, dict[str, Callable[[bool], Call]]] = {
    "rms_norm": {
        "torch eager": eager(add_rms_norm, "x", "residual", "weight"),
        "torch.compile": compiled(add_rms_norm, "x", "residual", "weight"),
        "liger": liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction",
                       "x", "residual", "weight", EPS),
    },
    "rms_norm_grad": {
        "torch eager": backward(rms_norm, ("s", "weight"), "dy"),
        "torch.compile": compiled_backward(rms_norm, ("s", "weight"), "dy"),
    },
    "layer_norm": {"torch eager": eager(add_layer_norm, "x", "residual", "weight", "bias")},
    "layer_norm_grad": {"torch eager": backward(layer_norm, ("s", "weight", "bias"), "dy")},
    "swiglu": {
        "torch eager": eager(swiglu, "h"),
        "torch.compile": compiled(swiglu, "h"),
        "liger": liger_swiglu,
    },
    "swiglu_grad": {
        "torch eager": backward(swiglu, ("h",), "da"),
        "torch.compile": compiled_backward(swiglu, ("h",), "da"),
    },
    "gelu": {"torch eager": eager(gelu, "h", "bias")},
    "gelu_grad": {"torch eager": backward(gelu, ("h", "bias"), "da")},
    "rope": {
        "torch eager": eager(rope, "x", "cos", "sin"),
        "torch.compile": compiled(rope, "x", "cos", "sin"),
    },
    "dropout": {"torch eager": lambda dry: lambda i: F.dropout(i["x"], 0.1)},
    "cast_bf16": {"torch eager": lambda dry: lambda i: i["x"].bfloat16()},
    "cross_entropy": {
        "torch eager": eager(loss, "logits", "label"),
        "torch.compile": compiled(loss, "logits", "label"),
    },
    "cross_entropy_shards": {
        "torch eager": lambda dry: loss_and_grad,
        "liger": liger("cross_entropy", "LigerCrossEntropyFunction", "logits", "label", None),
    },
    "adamw": {"torch fused": fused_adamw},
    "sum_squares": {"torch eager": lambda dry: lambda i: torch.linalg.vector_norm(i["x"])},
    "grouped_linear": {"torch grouped_mm": grouped_product},
    "attention 128": attention_rivals(False),
    "attention 128 grad": attention_rivals(True),
    "attention 64": attention_rivals(False),
    "attention 64 grad": attention_rivals(True),
}  # fmt: skip
