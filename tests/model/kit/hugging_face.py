"""The stock transformers classes, filled with a model's own weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megalite.config import ModelConfig

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
# Where GPT-2 and the others keep what we keep in one place: our name -> theirs.
GPT2_LAYER = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.down": "mlp.down_proj",
}


def stock_model(
    config: ModelConfig, max_positions: int, attention: str = "sdpa"
) -> PreTrainedModel:
    """The untrained stock model of the same shape, in float64, without dropout."""
    if config.family == "gpt2":
        implementation: dict[str, Any] = {"attn_implementation": attention}  # not in the signature
        return (
            GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=config.vocab_size,
                    n_positions=config.max_positions,
                    n_embd=config.hidden_size,
                    n_layer=config.num_layers,
                    n_head=config.num_heads,
                    n_inner=config.ffn_hidden_size,
                    layer_norm_epsilon=config.norm_eps,
                    tie_word_embeddings=config.tie_embeddings,
                    **implementation,
                )
            )
            .double()
            .eval()
        )
    config_class, model_class = CLASSES[config.family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_max_position,
        }
    theirs = config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation=attention,
        **({"sliding_window": config.sliding_window} if config.family == "mistral" else {}),
    )
    return model_class(theirs).double().eval()


def as_theirs(config: ModelConfig, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients, by global name) under the stock model's names."""
    rename = _gpt2 if config.family == "gpt2" else _others
    found: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        if name in ("embedding.weight", "head.weight"):
            tensor = tensor[: config.vocab_size]
        found |= rename(config, name, tensor)
    return found


def _parts(config: ModelConfig, packed: Tensor) -> list[Tensor]:
    """q, k and v with whole heads as rows, of packed [K, g + 2, H, ...]."""
    group = config.num_heads // config.kv_heads
    return [part.flatten(0, 2) for part in packed.split([group, 1, 1], 1)]


def _gpt2(config: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    outside = {
        "embedding.weight": "transformer.wte.weight",
        "head.weight": "lm_head.weight",
        "position.weight": "transformer.wpe.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
    }
    if name in outside:
        return {outside[name]: tensor}
    _, layer, middle, kind = name.split(".", 2)[0:2] + name.split(".", 2)[2].rsplit(".", 1)
    if middle == "attention.qkv":
        tensor = torch.cat(_parts(config, tensor))
    theirs = f"transformer.h.{layer}.{GPT2_LAYER[middle]}.{kind}"
    return {theirs: tensor.t() if tensor.dim() == 2 else tensor}  # their Conv1D is transposed


def _others(config: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    outside = {
        "embedding.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "final_norm.weight": "model.norm.weight",
    }
    if name in outside:
        return {outside[name]: tensor}
    _, layer, middle, kind = name.split(".", 2)[0:2] + name.split(".", 2)[2].rsplit(".", 1)
    prefix = f"model.layers.{layer}"
    if middle == "attention.qkv":
        parts = zip("qkv", _parts(config, tensor), strict=True)
        return {f"{prefix}.self_attn.{letter}_proj.{kind}": part for letter, part in parts}
    if middle == "mlp.gate_up":
        return {f"{prefix}.mlp.{n}_proj.{kind}": tensor[i] for i, n in enumerate(("gate", "up"))}
    return {f"{prefix}.{LAYER[middle]}.{kind}": tensor}


def fill(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Give the stock model these weights; every one of its parameters must be among them."""
    named: dict[str, nn.Parameter] = dict(model.named_parameters())
    assert named.keys() == weights.keys(), named.keys() ^ weights.keys()
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(weights[name])
