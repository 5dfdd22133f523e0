"""A small model with its batch, whole or in stages, and the same model in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig
from megalite.distributed.mesh import Mesh
from megalite.model.init import init_params
from megalite.model.transformer import Transformer
from megalite.tensor_parallel.context import TensorParallel
from megalite.topology import Topology

SEQ_LENGTH = 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    token_T: Tensor
    label_T: Tensor
    weight_T: Tensor
    cu_seqlens: tuple[int, ...]


def model_config(**changes: Any) -> ModelConfig:
    sizes = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 20,
        "vocab_size": 29,
        "vocab_pad_multiple": 8,
        "init_std": 0.2,  # far from zero, so that a lost term is seen
    }
    return ModelConfig(**{**sizes, **changes})


def make_batch(vocab: int = 29, num_sequences: int = 2, cuts: tuple[int, ...] = ()) -> Batch:
    """Random tokens and weights, some of them 0; `cuts` begin documents inside the sequences."""
    generator = torch.Generator().manual_seed(7)
    tokens = num_sequences * SEQ_LENGTH
    drawn = torch.randint(0, vocab, (2, tokens), generator=generator)
    weight = torch.rand(tokens, generator=generator, dtype=torch.float64)
    weight[::5] = 0.0
    bounds = {*range(0, tokens + 1, SEQ_LENGTH), *cuts}
    return Batch(drawn[0], drawn[1], weight / weight.sum(), tuple(sorted(bounds)))


def make_stage(config: ModelConfig, layers: range | None = None, **options: Any) -> Transformer:
    """One stage in one process with its initial weights; the whole model unless told otherwise."""
    tp = TensorParallel(Mesh(Topology()).tp, options.pop("dtype", torch.float64), CPU)
    layers = range(config.num_layers) if layers is None else layers
    seq_length = options.pop("seq_length", SEQ_LENGTH)
    stage = Transformer(config, tp, seq_length=seq_length, layers=layers, **options)
    init_params(stage.named_params(), config, seed=5, tp=1, tp_rank=0)
    with torch.no_grad():  # norm weights away from 1, so that their place is seen
        for param, spec in stage.named_params():
            if len(spec.shape) == 1:
                param.add_(torch.linspace(-0.5, 0.5, len(param)))
    return stage


def gradients(*stages: Transformer) -> dict[str, Tensor]:
    """Main gradients by global name; a tied copy's is added to its original's."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for param, spec in stage.named_params():
            grad = stage.grads.buffer(param)
            found[spec.name] = found[spec.name] + grad if spec.name in found else grad.clone()
            assert param.grad is None
    return found


def weights(stage: Transformer) -> dict[str, Tensor]:
    """float64 leaves of the same values, by global name."""
    return {s.name: p.detach().double().requires_grad_() for p, s in stage.named_params()}


def plain_logits(config: ModelConfig, weight: dict[str, Tensor], batch: Batch) -> Tensor:
    """Llama in plain torch, for padded vocabulary rows too: shares no code with the product."""
    tokens, heads, groups = len(batch.token_T), config.num_heads, config.kv_heads
    document = torch.zeros(tokens, dtype=torch.int64)
    for number, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
        document[start:stop] = number
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen &= document[:, None] == document[None, :]

    def norm(x: Tensor, name: str) -> Tensor:
        scale = torch.sqrt(x.square().mean(-1, keepdim=True) + config.norm_eps)
        return x / scale * weight[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rate = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        position = torch.arange(tokens, dtype=torch.float64) % SEQ_LENGTH
        angle = (position[:, None] * rate)[:, None, :]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def attend(x: Tensor, name: str) -> Tensor:
        packed = torch.einsum("td,kghd->tkgh", x, weight[f"{name}.qkv.weight"])
        q = packed[:, :, :-2].reshape(tokens, heads, -1)
        k, v = (packed[:, :, i].repeat_interleave(heads // groups, 1) for i in (-2, -1))
        scores = torch.einsum("tnh,snh->nts", turn(q), turn(k)) / q.shape[-1] ** 0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("nts,snh->tnh", shares, v).flatten(1) @ weight[f"{name}.out.weight"].t()

    def feed_forward(x: Tensor, name: str) -> Tensor:
        gate, up = weight[f"{name}.gate_up.weight"]
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ weight[f"{name}.down.weight"].t()

    x = weight["embedding.weight"][batch.token_T]
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        x = x + attend(norm(x, f"{name}.attention_norm"), f"{name}.attention")
        x = x + feed_forward(norm(x, f"{name}.mlp_norm"), f"{name}.mlp")
    head = weight["embedding.weight" if config.tie_embeddings else "head.weight"]
    return norm(x, "final_norm") @ head.t()


def plain_loss(config: ModelConfig, weight: dict[str, Tensor], batch: Batch) -> Tensor:
    """Weighted sum of the tokens' losses over the true vocabulary."""
    logits = plain_logits(config, weight, batch)[:, : config.vocab_size]
    return (F.cross_entropy(logits, batch.label_T, reduction="none") * batch.weight_T).sum()


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest magnitude of `want`; NaN anywhere gives NaN."""
    assert got.shape == want.shape, (got.shape, want.shape)
    want = want.detach().double()
    scale = float(want.abs().max()) or 1.0
    return float((got.detach().double() - want).abs().max()) / scale
