"""How fast one thread multiplies exactly the matrices that a training step multiplies.

Nothing but the products: operands are allocated before, and those of weights are multiplied by the
functions that the layers call, which choose the library. So this is the least time that a step
could take with these libraries, and the denominator of the "CPU MFU".
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.distributed.mesh import Mesh
from megalite.kernels import Kernels


@dataclass(frozen=True)
class ProductTimes:
    """Seconds for the products of one microbatch, whole model, forward and both gradients."""

    weights_s: float  # qkv, out, gate_up, down of every layer, and the head
    attention_s: float  # QK^T and PV of every layer and their four gradients, full S x S


@dataclass(frozen=True)
class Linear:
    """Operands of one linear layer: y = x W^T, dx = dy W, dW += dy^T x."""

    x_TD: Tensor
    dy_TF: Tensor
    weight_FD: Tensor
    grad_FD: Tensor

    def run(self) -> None:
        Kernels.linear(self.x_TD, self.weight_FD)
        Kernels.linear_input_grad(self.dy_TF, self.weight_FD)
        Kernels.accumulate_weight_grad_(self.grad_FD, self.dy_TF, self.x_TD)


class Products:
    """A lane's worker that times the products at any number of tokens per microbatch."""

    def __init__(self, mesh: Mesh, model: ModelConfig, seq_length: int) -> None:
        assert mesh.world.size == 1, "the rate is that of one thread"
        self.model, self.seq_length = model, seq_length
        self._tokens = 0

    def measure(self, num_tokens: int) -> ProductTimes:
        """Times of one microbatch of `num_tokens`; warms up when the number is a new one."""
        if num_tokens != self._tokens:
            self._allocate(num_tokens)
            self._run_weights()
            self._run_attention()
        began = time.perf_counter()
        self._run_weights()
        middle = time.perf_counter()
        self._run_attention()
        return ProductTimes(middle - began, time.perf_counter() - middle)

    def _allocate(self, num_tokens: int) -> None:
        self._tokens = num_tokens
        shapes = layer_shapes(self.model)
        activations = {shape: activation_pair(num_tokens, shape) for shape in set(shapes)}
        self._linears = []
        for shape in shapes:
            weight = torch.randn(shape)
            self._linears.append(Linear(*activations[shape], weight, torch.zeros_like(weight)))
        heads = num_tokens // self.seq_length * self.model.num_heads
        wide = (heads, self.seq_length, self.model.head_size)
        self._q, self._k, self._v, self._grad, self._out = (torch.randn(wide) for _ in range(5))
        self._scores, self._weights = (torch.randn(heads, wide[1], wide[1]) for _ in range(2))

    def _run_weights(self) -> None:
        for layer in self._linears:
            layer.run()

    def _run_attention(self) -> None:
        q, k, v, grad, out = self._q, self._k, self._v, self._grad, self._out
        for _ in range(self.model.num_layers):
            torch.bmm(q, k.mT, out=self._scores)
            torch.bmm(self._weights, v, out=out)
            torch.bmm(grad, v.mT, out=self._scores)
            torch.bmm(self._weights.mT, grad, out=out)
            torch.bmm(self._weights, k, out=out)
            torch.bmm(self._weights.mT, q, out=out)


def layer_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """(output, input) features of every linear layer of the model, in order of use."""
    hidden, width = model.hidden_size, model.num_heads * model.head_size
    qkv = width + 2 * model.kv_heads * model.head_size
    ffn = model.ffn_hidden_size
    layer = [(qkv, hidden), (hidden, width), (2 * ffn, hidden), (hidden, ffn)]
    return [*(layer * model.num_layers), (model.vocab_size, hidden)]


def activation_pair(num_tokens: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(x, dy)."""
    out_features, in_features = shape
    return torch.randn(num_tokens, in_features), torch.randn(num_tokens, out_features)
