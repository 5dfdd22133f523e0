"""A small model with its batch, whole or in stages, and the same model in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig
from megalite.distributed.mesh import Mesh
from megalite.kernels import Kernels
from megalite.layout.topology import Topology
from megalite.model.init import init_params
from megalite.model.transformer import Transformer
from megalite.run.parameters import ModelStage, whole_model
from megalite.tensor_parallel.context import LayerContext
from tests.model.kit import masks

SEQ_LENGTH = 8
DROPOUT = {"embedding_dropout": 0.2, "attention_dropout": 0.3, "residual_dropout": 0.25}
# Each family, and switches that no family has on by default, small enough to see each term.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {
        "rope_scaling": "llama3",
        "rope_theta": 40.0,
        "rope_original_max_position": 40,
        "head_dim": 12,
    },
    "gpt2": {"family": "gpt2", "num_kv_heads": None, "max_positions": SEQ_LENGTH + 3, **DROPOUT},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 6},
    "mistral": {"family": "mistral", "sliding_window": 3},
    "mixed": {
        "norm": "layernorm",
        "qk_norm": True,
        "activation": "geglu",
        "attention_out_bias": True,
        "rope_fraction": 0.5,
        "sliding_window": 5,
        "attention_dropout": 0.3,
        "head_dim": 8,
    },
    "smollm3": {
        "family": "smollm3",
        "layers": ["full", "full_nope"],
        "rope_theta": 40.0,
        "attention_out_bias": True,
        "qkv_bias": True,
        "mlp_bias": True,
    },
    "olmo2": {"family": "olmo2", "rope_theta": 40.0},
    "olmo3": {
        "family": "olmo3",
        "sliding_window": 3,
        "layers": ["window", "full"],
        "rope_theta": 40.0,
        "rope_local_theta": 30.0,
        "rope_scaling": "yarn",
        "rope_original_max_position": 50,
        "rope_beta_fast": 6.0,
        "head_dim": 16,
    },
    "gemma3": {
        "family": "gemma3",
        "sliding_window": 3,
        "layers": ["window", "full"],
        "rope_theta": 40.0,
        "rope_local_theta": 30.0,
        "rope_scaling": "linear",
        "rope_factor": 3.0,
        "head_dim": 6,
        "attention_multiplier": 7**-0.5,
    },
    "phi3": {"family": "phi3", "rope_fraction": 0.5, "head_dim": 4, "sliding_window": 3},
    "granite": {
        "family": "granite",
        "rope_theta": 40.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
        "embedding_multiplier": 5.0,
    },
    "gpt_neox": {
        "family": "gpt_neox",
        "num_kv_heads": None,
        "hidden_size": 32,
        "rope_theta": 40.0,
    },
    "linear": {"rope_scaling": "linear", "rope_factor": 3.0},
    "yarn": {
        "rope_scaling": "yarn",
        "rope_factor": 5.0,
        "rope_theta": 40.0,
        "rope_original_max_position": 50,
        "rope_beta_fast": 6.0,
        "rope_beta_slow": 0.7,
        "head_dim": 16,
        "qk_norm": True,
    },
    "multipliers": {
        "embedding_multiplier": 7.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
        "norm_zero_centered": True,
        "qk_norm": True,
        "rope_scaling": "yarn",
        "rope_truncate": False,
        "rope_original_max_position": 50,
        "rope_attention_factor": 1.2,
        "head_dim": 12,
        "sliding_window": 4,
        "embedding_dropout": 0.2,
    },
    "layers": {
        "num_layers": 5,
        "layers": ["window", "full_nope", "full", "window_nope"],
        "sliding_window": 3,
        "rope_local_theta": 30.0,
        "rope_scaling": "linear",
        "norm_place": "both",
        "norm_zero_centered": True,
    },
    "after": {
        "norm_place": "after",
        "qk_norm": True,
        "qk_norm_over": "projection",
        "residual_dropout": 0.25,
        "norm_zero_centered": True,
    },
    "parallel": {"family": "gpt2", "parallel_residual": True, "max_positions": SEQ_LENGTH},
    "geglu_tanh": {"activation": "geglu_tanh", "mlp_bias": True},
    "gelu": {"activation": "gelu", "mlp_bias": True, "qkv_bias": True},
    "relu2": {"activation": "relu2"},
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    token_T: Tensor
    label_T: Tensor
    weight_T: Tensor
    cu_seqlens: tuple[int, ...]
    dropout: Any = None
    masks: Any = field(default_factory=dict)
    position_T: Tensor | None = None


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


def make_stage(config: ModelConfig, stage: ModelStage | None = None, **options: Any) -> Transformer:
    """One stage in one process with its initial weights; the whole model by default."""
    mesh = Mesh(Topology())
    dtype, ops = options.pop("dtype", torch.float64), options.pop("ops", Kernels())
    context = LayerContext(mesh.tp, dtype, CPU, ops=ops)
    seq_length = options.pop("seq_length", SEQ_LENGTH)
    stage = stage or whole_model(config)
    chunk = Transformer(config, context, stage, seq_length=seq_length, **options)
    init_params(chunk.named_params(), 5, mesh.axis)
    with torch.no_grad():  # norm weights away from 1, biases from 0, so that their place is seen
        for param, spec in chunk.named_params():
            if spec.role in ("norm", "bias"):
                param.add_(torch.linspace(-0.5, 0.5, param.numel()).view(param.shape))
    return chunk


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


def plain_rates(config: ModelConfig, base: float | None = None) -> Tensor:
    """Angle per token of each pair that turns; a base of its own is not scaled."""
    half = config.rotary_size // 2
    rate = (base or config.rope_theta) ** (-torch.arange(half, dtype=torch.float64) / max(1, half))
    if config.rope_scaling is None or base is not None:
        return rate
    if config.rope_scaling == "linear":
        return rate / config.rope_factor
    if config.rope_scaling == "yarn":
        ends = [
            half
            * math.log(config.rope_original_max_position / (turns * 2 * math.pi))
            / math.log(config.rope_theta)
            for turns in (config.rope_beta_fast, config.rope_beta_slow)
        ]
        if config.rope_truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], 2 * half - 1)
        ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(half)]
        slow = torch.tensor(ramp, dtype=torch.float64)
        return rate / config.rope_factor * slow + rate * (1 - slow)
    length, scaled = config.rope_original_max_position, []
    for r in rate.tolist():
        wave = 2 * math.pi / r  # tokens of one turn
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        if wave < length / high:
            scaled.append(r)
        elif wave > length / low:
            scaled.append(r / config.rope_factor)
        else:
            smooth = (length / wave - low) / (high - low)
            scaled.append((1 - smooth) * r / config.rope_factor + smooth * r)
    return torch.tensor(scaled, dtype=torch.float64)


def plain_gain(config: ModelConfig) -> float:
    """Factor of rotated queries and keys."""
    if config.rope_scaling != "yarn":
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(config.rope_factor) + 1


def plain_logits(config: ModelConfig, weight: dict[str, Tensor], batch: Batch) -> Tensor:
    """The model in plain torch, for padded vocabulary rows too: shares no code with the product."""
    tokens, heads, groups = len(batch.token_T), config.num_heads, config.kv_heads
    place = torch.arange(tokens)
    document = torch.zeros(tokens, dtype=torch.int64)
    for number, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
        document[start:stop] = number
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    causal &= document[:, None] == document[None, :]
    names = config.layers or (["full"] if config.sliding_window is None else ["window"])
    position, residual_p = place % SEQ_LENGTH, config.residual_dropout
    one = 1.0 if config.norm_zero_centered else 0.0

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ weight[f"{name}.weight"].flatten(0, -2).t()
        return y + weight[f"{name}.bias"].flatten() if f"{name}.bias" in weight else y

    def norm(x: Tensor, name: str) -> Tensor:
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + config.norm_eps)
        y = y * (one + weight[f"{name}.weight"])
        return y + weight[f"{name}.bias"] if config.norm == "layernorm" else y

    def head_norm(x: Tensor, name: str) -> Tensor:
        if config.qk_norm_over == "projection":
            x = x.flatten(1)
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + config.norm_eps)
        y = y * (one + weight[f"{name}.weight"].flatten())
        return y.view(tokens, -1, config.head_size)

    def turn(x: Tensor, base: float | None) -> Tensor:
        angle = (position[:, None] * plain_rates(config, base))[:, None, :]
        half = angle.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        first, second = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        gain = plain_gain(config) if base is None else 1.0
        return torch.cat([gain * first, gain * second, rest], -1)

    def attend(x: Tensor, layer: int) -> Tensor:
        name = f"layers.{layer}.attention"
        packed = linear(x, f"{name}.qkv").view(tokens, groups, heads // groups + 2, -1)
        q = packed[:, :, :-2].reshape(tokens, heads, -1)
        k, v = packed[:, :, -2], packed[:, :, -1]
        if config.qk_norm:
            q, k = head_norm(q, f"{name}.q_norm"), head_norm(k, f"{name}.k_norm")
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
        scale = config.attention_multiplier or q.shape[-1] ** -0.5
        kind = names[layer % len(names)]
        seen = causal
        if kind.startswith("window"):
            assert config.sliding_window is not None
            seen = causal & (place[:, None] - place[None, :] < config.sliding_window)
        if not kind.endswith("nope"):
            base = config.rope_local_theta if kind == "window" else None
            q, k = turn(q, base), turn(k, base)
        scores = torch.einsum("tnh,snh->nts", q, k) * scale
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        shares = masks.drop_weights(shares, config.attention_dropout, batch.dropout, layer)
        return linear(torch.einsum("nts,snh->tnh", shares, v).flatten(1), f"{name}.out")

    def bend(h: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)
        return {
            "swiglu": h / (1 + torch.exp(-h)),
            "gelu": h * (1 + torch.erf(h / math.sqrt(2))) / 2,
            "gelu_tanh": h * (1 + torch.tanh(inner)) / 2,
            "relu2": torch.where(h > 0, h * h, 0.0),
        }[config.activation.replace("geglu", "gelu")]

    def feed_forward(x: Tensor, layer: int) -> Tensor:
        name = f"layers.{layer}.mlp"
        if config.activation in ("swiglu", "geglu", "geglu_tanh"):
            gate, up = linear(x, f"{name}.gate_up").chunk(2, -1)
            return linear(bend(gate) * up, f"{name}.down")
        return linear(bend(linear(x, f"{name}.up")), f"{name}.down")

    def drop(x: Tensor, layer: int, kind: str) -> Tensor:
        return config.residual_multiplier * masks.drop_rows(
            x, residual_p, batch.dropout, layer, kind
        )

    given = config.embedding_multiplier
    factor = math.sqrt(config.hidden_size) if given is None else given
    x = weight["embedding.weight"][batch.token_T] * factor
    if config.positions == "learned":
        x = x + weight["position.weight"][position]
    x = masks.drop_rows(x, config.embedding_dropout, batch.dropout, -1, "embedding")

    def block(x: Tensor, layer: int, name: str, function: Any) -> Tensor:
        if config.norm_place != "after":
            x = norm(x, f"layers.{layer}.{name}_norm")
        y = function(x, layer)
        if config.norm_place != "before":
            y = norm(y, f"layers.{layer}.{name}_post_norm")
        return drop(y, layer, f"{name} output")

    for layer in range(config.num_layers):
        attended = x + block(x, layer, "attention", attend)
        source = x if config.parallel_residual else attended
        x = attended + block(source, layer, "mlp", feed_forward)
    head = weight["embedding.weight" if config.tie_embeddings else "head.weight"]
    return norm(x, "final_norm") @ head.t() / config.logits_scaling


def plain_loss(config: ModelConfig, weight: dict[str, Tensor], batch: Batch) -> Tensor:
    """Weighted sum of the tokens' losses over the true vocabulary."""
    logits = plain_logits(config, weight, batch)[:, : config.vocab_size]
    return (F.cross_entropy(logits, batch.label_T, reduction="none") * batch.weight_T).sum()


def relative_error(got: Tensor, want: Tensor | None) -> float:
    """Largest difference over the largest magnitude of `want`; NaN anywhere gives NaN.

    A gradient that is missing (None) fails.
    """
    assert want is not None
    assert got.shape == want.shape, (got.shape, want.shape)
    want = want.detach().double()
    scale = float(want.abs().max()) or 1.0
    return float((got.detach().double() - want).abs().max()) / scale
