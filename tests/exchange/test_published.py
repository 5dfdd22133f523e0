"""Configs as models were published with them, in the dialect of transformers 4: none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.config.load import load_config
from megalite.config.meaning import function_settings
from megalite.exchange.classes import read_model, weights_config

ROPE: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "attention_dropout": 0.0,
}
LLAMA = {**ROPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "pretraining_tp": 1}
QWEN = {"bos_token_id": 151643, "eos_token_id": 151643, "vocab_size": 151936}
# Our name of each model -> the keys that it was published with.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        **LLAMA,
        "_name_or_path": "local",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "llama-3.2-1b": {
        **LLAMA,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "mistral-7b-v0.3": {
        **ROPE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
    "qwen2.5-0.5b": {
        **ROPE,
        **QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "qwen3-0.6b": {
        **ROPE,
        **QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "gpt2-124m": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_shipped_model(name: str, tmp_path: Path) -> None:
    run = '[data]\npath = "x"\nseq_length = 8\n[train]\nsteps = 1\nglobal_batch = 1\n'
    (tmp_path / "run.toml").write_text(f'base = "models/{name}"\n{run}')
    shipped = load_config(tmp_path / "run.toml").config.model
    row, model = read_model(PUBLISHED[name], frozenset())
    ours, theirs = (function_settings(weights_config(one)) for one in (shipped, model))
    assert theirs == ours
    assert row.family == shipped.family
