"""The model families by name: the defaults of model settings that a config leaves out.

A family is no code path. Every trait is a setting of its own in `ModelConfig`, the model is built
from those settings alone, and a family only gives their defaults. So any trait can be changed by
itself, and a new family is a new row here, unless it needs a part that does not exist.
"""

from __future__ import annotations

from typing import Any

# Each as far as it differs from llama, whose defaults are those of the schema. They follow the
# configurations these models were published with.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
        "embedding_dropout": 0.1,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "qwen2": {"norm_eps": 1e-6, "rope_theta": 1_000_000.0, "qkv_bias": True},
    "qwen3": {"norm_eps": 1e-6, "rope_theta": 1_000_000.0, "head_dim": 128, "qk_norm": True},
    "mistral": {"sliding_window": 4096},
    "smollm3": {
        "norm_eps": 1e-6,
        "rope_theta": 5_000_000.0,
        "layers": ["full", "full", "full", "full_nope"],
        "tie_embeddings": True,
    },
    "olmo2": {
        "norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "norm_place": "after",
        "qk_norm": True,
        "qk_norm_over": "projection",
    },
    "olmo3": {
        "norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "rope_local_theta": 500_000.0,
        "norm_place": "after",
        "qk_norm": True,
        "qk_norm_over": "projection",
        "sliding_window": 4096,
        "layers": ["window", "window", "window", "full"],
    },
    "gemma3": {
        "norm_eps": 1e-6,
        "norm_zero_centered": True,
        "norm_place": "both",
        "rope_theta": 1_000_000.0,
        "rope_local_theta": 10_000.0,
        "activation": "geglu_tanh",
        "head_dim": 256,
        "qk_norm": True,
        "sliding_window": 1024,
        "layers": ["window", "window", "window", "window", "window", "full"],
        "tie_embeddings": True,
        "embedding_multiplier": None,
    },
    "phi3": {},
    "granite": {
        "tie_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    "gpt_neox": {
        "norm": "layernorm",
        "rope_fraction": 0.25,
        "activation": "gelu",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "parallel_residual": True,
    },
}


def family_defaults(name: str) -> dict[str, Any]:
    """Defaults that a family gives, by setting; none for an unknown name."""
    return FAMILIES.get(name, {})
