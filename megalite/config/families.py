"""The model families by name: the defaults of model settings that a config leaves out.

A family is no code path. Every trait is a setting of its own in `ModelConfig`, the model is built
from those settings alone, and a family only gives their defaults. So any trait can be changed by
itself, and a new family is a new row here, unless it needs a part that does not exist.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """Defaults of the settings of the same names in `ModelConfig`."""

    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    positions: str = "rope"
    rope_theta: float = 10000.0
    activation: str = "swiglu"
    head_dim: int | None = None
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    tie_embeddings: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0


# Defaults follow the configurations these models were published with.
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "gpt2": Family(
        norm="layernorm",
        positions="learned",
        activation="gelu_tanh",
        qkv_bias=True,
        linear_bias=True,
        tie_embeddings=True,
        embedding_dropout=0.1,
        attention_dropout=0.1,
        residual_dropout=0.1,
    ),
    "qwen2": Family(norm_eps=1e-6, rope_theta=1_000_000.0, qkv_bias=True),
    "qwen3": Family(norm_eps=1e-6, rope_theta=1_000_000.0, head_dim=128, qk_norm=True),
    "mistral": Family(sliding_window=4096),
}


def family_defaults(name: str) -> dict[str, Any]:
    """Defaults that a family gives, by setting; those of llama for an unknown name."""
    return asdict(FAMILIES.get(name, Family()))
