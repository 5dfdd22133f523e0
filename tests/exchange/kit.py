"""Stock models at values that are no defaults, their folders, and logits of both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, POSITIONS = 61, 77
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 3e-3,
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
    "pad_token_id": 6,
}
THETA = {"rope_type": "default", "rope_theta": 40.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 40.0,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 40,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 40.0,
    "factor": 4.0,
    "beta_fast": 6.0,
    "original_max_position_embeddings": 40,
}
# Every class, with each of its traits away from the default in one row or another.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        **SIZES,
        "rope_parameters": THETA,
        "head_dim": 12,
        "mlp_bias": True,
    },
    "llama3": {
        "model_type": "llama",
        **SIZES,
        "rope_parameters": LLAMA3,
        "attention_bias": True,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral",
        **SIZES,
        "num_key_value_heads": 4,
        "rope_parameters": THETA,
        "head_dim": 6,
        "sliding_window": 5,
    },
    "qwen2": {
        "model_type": "qwen2",
        **SIZES,
        "rope_parameters": THETA,
        "tie_word_embeddings": True,
    },
    "qwen2-window": {
        "model_type": "qwen2",
        **SIZES,
        "rope_parameters": LLAMA3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 0,
    },
    "qwen3": {
        "model_type": "qwen3",
        **SIZES,
        "rope_parameters": THETA,
        "head_dim": 6,
        "attention_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "smollm3": {
        "model_type": "smollm3",
        **SIZES,
        "rope_parameters": THETA,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "olmo2": {
        "model_type": "olmo2",
        **SIZES,
        "rope_parameters": YARN,
        "attention_bias": True,
    },
    "olmo3": {
        "model_type": "olmo3",
        **SIZES,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": THETA},
        "sliding_window": 5,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
            "sliding_attention": THETA,
        },
        "query_pre_attn_scalar": 7,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": False,
    },
    "phi3": {
        "model_type": "phi3",
        **SIZES,
        "rope_parameters": {**THETA, "partial_rotary_factor": 0.5},
        "sliding_window": 5,
    },
    "granite": {
        "model_type": "granite",
        **SIZES,
        "rope_parameters": THETA,
        "embedding_multiplier": 5.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "mlp_bias": True,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "layer_norm_eps": 3e-3,
        "rope_parameters": {**THETA, "partial_rotary_factor": 0.5},
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": 52,
        "n_positions": POSITIONS,
        "layer_norm_epsilon": 3e-3,
        "bos_token_id": 3,
        "eos_token_id": 4,
    },
    "gpt2-untied": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 2,
        "n_positions": POSITIONS,
        "activation_function": "relu2",
        "tie_word_embeddings": False,
    },
}


def stock(keys: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """A stock model of these keys: weights of 0.2, norms around 1, biases as large as weights."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys))
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_norm = name.endswith("weight") and param.dim() == 1
            param.normal_(1.0 if is_norm else 0.0, 0.2)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The model's folder, in shards of 20 KB."""
    same: Any = model
    same.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return folder


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Set keys of a JSON file; None takes a key out."""
    path = folder / name
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= changes
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def whole(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """The same folder with these tensors in a single file."""
    for file in folder.glob("model*"):
        file.unlink()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def tokens(num: int = 24) -> Tensor:
    return torch.randint(0, VOCAB, (num,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def stock_logits(model: PreTrainedModel) -> Tensor:
    """Logits of the tokens [T, V]."""
    logits: Tensor = model(tokens()[None]).logits[0]
    return logits
