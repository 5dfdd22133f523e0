"""The stock classes that are known: one row each. A further family is a row here.

A row has the class's name, the traits between its config.json and [model], and the names of its
tensors. A class can hold a model if reading what its traits write gives the model back; no row says
so by hand. Defaults are those that transformers' class takes where a file leaves a key out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from megalite.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megalite.config.meaning import function_settings
from megalite.config.names import toml_value
from megalite.errors import CheckpointError
from megalite.exchange.keys import (
    Always,
    AttentionBias,
    Choice,
    ConfigFile,
    HeadDim,
    InnerSize,
    KeyValueHeads,
    Layers,
    NeoXDropout,
    Only,
    QueryScalar,
    Trait,
    Value,
    Window,
)
from megalite.exchange.rope import LayerRope, Rope
from megalite.exchange.tensors import Names, Stacked, Theirs


@dataclass(frozen=True)
class StockClass:
    """A class of models in transformers: `name` in `architectures`, `model_type`, and what it is.

    `positions_key` holds the longest sequence that the model was made for. `idle`: keys of this
    class that do not change the function, beside those of every class.
    """

    name: str
    model_type: str
    family: str
    traits: tuple[Trait, ...]
    names: Names
    positions_key: str = "max_position_embeddings"
    idle: frozenset[str] = frozenset()

    def settings(self, entries: Mapping[str, Any]) -> tuple[dict[str, Any], ConfigFile]:
        """The settings of [model] that a config.json gives, and the file with its problems."""
        file = ConfigFile(entries)
        found: dict[str, Any] = {"family": self.family}
        for trait in self.traits:
            found |= trait.read(file)
        return found, file

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of config.json that say this model."""
        keys: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        for trait in self.traits:
            keys |= trait.write(model)
        return keys

    def why_not(self, model: ModelConfig) -> list[str]:
        """The settings of a model that this class cannot have, each with its value."""
        settings, file = self.settings(self.write(model))
        if file.problems:
            return file.problems
        try:
            back = ModelConfig(**settings)
        except ValidationError as error:
            return [f"{problem['loc']}: {problem['msg']}" for problem in error.errors()]
        ours, theirs = (function_settings(weights_config(one)) for one in (model, back))
        return [
            f"{name}={toml_value(value)}"
            for name, value in ours.items()
            if theirs.get(name) != value
        ]


# Keys of any class that do not change its function: names, versions, kernels, training, generation
# and the heads of other tasks. Bos, eos and the like are carried over.
_IDLE = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label label2id length_penalty
    max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unk_token_id use_bfloat16 use_cache
"""
IDLE = frozenset(_IDLE.split())

_NO_DECODER_OF_ANOTHER = (
    Only("is_encoder_decoder", False, "encoder"),
    Only("add_cross_attention", False, "attention to another model's states"),
)
# Names of activation functions; the first of equal ones is written.
_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
_PLAIN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}
_NO_OTHER_BIAS = {"attention_out_bias": False, "mlp_bias": False}
_OLMO = {
    "norm_place": "after",
    "qk_norm": True,
    "qk_norm_over": "projection",
    "mlp_bias": False,
}
_ROPE_LAYER: Mapping[str, Theirs] = {
    "attention_norm": "input_layernorm",
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": "mlp.down_proj",
}
_ROPE_NAMES = Names(
    outside={
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
    prefix="model.layers.{}.",
    layer=_ROPE_LAYER,
    base="model.",
    ignored=(r"(.*\.)?rotary_emb\.inv_freq",),
)
_POST_NORMS: Mapping[str, Theirs] = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_POST_NAMES = replace(_ROPE_NAMES, layer={**_ROPE_LAYER, **_POST_NORMS})


def _rope_traits(
    vocab_size: int,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    *,
    eps: float = 1e-6,
    tied: bool = False,
    activation: Trait | None = None,
) -> tuple[Trait, ...]:
    """The traits that all classes of Llama's build share, with one class's default sizes."""
    return (
        Value("vocab_size", "vocab_size", vocab_size),
        Value("hidden_size", "hidden_size", hidden),
        Value("intermediate_size", "ffn_hidden_size", ffn),
        Value("num_hidden_layers", "num_layers", layers),
        Value("num_attention_heads", "num_heads", heads),
        KeyValueHeads(kv_heads),
        Value("rms_norm_eps", "norm_eps", eps),
        Value("initializer_range", "init_std", 0.02),
        Value("attention_dropout", "attention_dropout", 0.0),
        Value("tie_word_embeddings", "tie_embeddings", tied),
        activation or Choice("hidden_act", "activation", _GATED, "silu"),
        Always({"norm": "rmsnorm", "positions": "rope"}),
        *_NO_DECODER_OF_ANOTHER,
    )


CLASSES: tuple[StockClass, ...] = (
    StockClass(
        "LlamaForCausalLM",
        "llama",
        "llama",
        (
            *_rope_traits(32000, 4096, 11008, 32, 32, None),
            HeadDim(None),
            Rope(),
            AttentionBias(),
            Value("mlp_bias", "mlp_bias", False),
            Always({"qk_norm": False, "sliding_window": None}),
        ),
        _ROPE_NAMES,
    ),
    StockClass(
        "MistralForCausalLM",
        "mistral",
        "mistral",
        (
            *_rope_traits(32000, 4096, 14336, 32, 32, 8),
            HeadDim(None),
            Rope(),
            Window(4096),
            Always({"qk_norm": False, "qkv_bias": False, **_NO_OTHER_BIAS}),
        ),
        _ROPE_NAMES,
    ),
    StockClass(
        "Qwen2ForCausalLM",
        "qwen2",
        "qwen2",
        (
            *_rope_traits(151936, 4096, 22016, 32, 32, 32),
            HeadDim(None),
            Rope(),
            Layers(32, 4096, switch=True),
            Only("use_mrope", False, "rotation by several positions"),
            Always({"qk_norm": False, "qkv_bias": True, **_NO_OTHER_BIAS}),
        ),
        _ROPE_NAMES,
        idle=frozenset({"max_window_layers"}),  # without windows; the trait writes it with them
    ),
    StockClass(
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen3",
        (
            *_rope_traits(151936, 4096, 22016, 32, 32, 32),
            HeadDim(128),
            Rope(),
            Layers(32, 4096, switch=True),
            AttentionBias(),
            Always({"qk_norm": True, "mlp_bias": False}),
        ),
        _ROPE_NAMES,
        idle=frozenset({"max_window_layers"}),
    ),
    StockClass(
        "GPT2LMHeadModel",
        "gpt2",
        "gpt2",
        (
            Value("vocab_size", "vocab_size", 50257),
            Value("n_positions", "max_positions", 1024),
            Value("n_embd", "hidden_size", 768),
            Value("n_layer", "num_layers", 12),
            Value("n_head", "num_heads", 12),
            InnerSize(),
            Value("layer_norm_epsilon", "norm_eps", 1e-5),
            Value("initializer_range", "init_std", 0.02),
            Value("embd_pdrop", "embedding_dropout", 0.1),
            Value("attn_pdrop", "attention_dropout", 0.1),
            Value("resid_pdrop", "residual_dropout", 0.1),
            Value("tie_word_embeddings", "tie_embeddings", True),
            Choice(
                "activation_function",
                "activation",
                _PLAIN,
                "gelu_new",
            ),
            Only("scale_attn_weights", True, "attention without its scale"),
            Only("scale_attn_by_inverse_layer_idx", False, "attention scaled by the layer"),
            Always(
                {
                    "norm": "layernorm",
                    "positions": "learned",
                    "qkv_bias": True,
                    "attention_out_bias": True,
                    "mlp_bias": True,
                    "qk_norm": False,
                    "sliding_window": None,
                    "num_kv_heads": None,
                    "head_dim": None,
                }
            ),
            *_NO_DECODER_OF_ANOTHER,
        ),
        Names(
            outside={
                "embedding": "transformer.wte",
                "position": "transformer.wpe",
                "final_norm": "transformer.ln_f",
                "head": "lm_head",
            },
            prefix="transformer.h.{}.",
            layer={
                "attention_norm": "ln_1",
                "attention.qkv": Stacked("attn.c_attn"),
                "attention.out": "attn.c_proj",
                "mlp_norm": "ln_2",
                "mlp.up": "mlp.c_fc",
                "mlp.down": "mlp.c_proj",
            },
            inputs_first=frozenset({"attention.qkv", "attention.out", "mlp.up", "mlp.down"}),
            base="transformer.",
            ignored=(r"(.*\.)?attn\.(masked_)?bias",),  # the causal mask
        ),
        positions_key="n_positions",
        idle=frozenset(
            {
                "n_ctx",
                "reorder_and_upcast_attn",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            }
        ),
    ),
    StockClass(
        "SmolLM3ForCausalLM",
        "smollm3",
        "smollm3",
        (
            *_rope_traits(128256, 2048, 11008, 36, 16, 4, tied=True),
            HeadDim(None),
            Rope(theta=2_000_000.0),
            Layers(36, None, nope=4, switch=True),
            AttentionBias(),
            Value("mlp_bias", "mlp_bias", False),
            Always({"qk_norm": False}),
        ),
        _ROPE_NAMES,
        idle=frozenset({"max_window_layers"}),
    ),
    StockClass(
        "Olmo2ForCausalLM",
        "olmo2",
        "olmo2",
        (
            *_rope_traits(50304, 4096, 11008, 32, 32, None, eps=1e-5),
            HeadDim(None),
            Rope(),
            AttentionBias(),
            Always({**_OLMO, "sliding_window": None}),
        ),
        _POST_NAMES,
    ),
    StockClass(
        "Olmo3ForCausalLM",
        "olmo3",
        "olmo3",
        (
            *_rope_traits(50304, 4096, 11008, 32, 32, None, eps=1e-5),
            HeadDim(None),
            LayerRope(500_000.0),
            Layers(32, 4096, period=4),
            AttentionBias(),
            Always(_OLMO),
        ),
        _POST_NAMES,
    ),
    StockClass(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "gemma3",
        (
            *_rope_traits(
                262_208,
                2304,
                9216,
                26,
                8,
                4,
                tied=True,
                activation=Choice("hidden_activation", "activation", _GATED, "gelu_pytorch_tanh"),
            ),
            HeadDim(256),
            LayerRope(1_000_000.0, 10_000.0, "rope_local_base_freq"),
            Layers(26, 4096, period=6),
            AttentionBias(),
            QueryScalar(256),
            Only("final_logit_softcapping", None, "caps of logits"),
            Only("attn_logit_softcapping", None, "caps of attention scores"),
            Only("use_bidirectional_attention", False, "attention to later tokens"),
            Always(
                {
                    "norm_zero_centered": True,
                    "norm_place": "both",
                    "qk_norm": True,
                    "mlp_bias": False,
                    "embedding_multiplier": None,
                }
            ),
        ),
        _POST_NAMES,
        idle=frozenset({"sliding_window_pattern", "_sliding_window_pattern"}),
    ),
    StockClass(
        "Phi3ForCausalLM",
        "phi3",
        "phi3",
        (
            *_rope_traits(32064, 3072, 8192, 32, 32, None, eps=1e-5),
            HeadDim(None),
            Rope(partial=True, scales=()),
            Window(None),
            Value("resid_pdrop", "residual_dropout", 0.0),
            Value("embd_pdrop", "embedding_dropout", 0.0),
            Always({"qk_norm": False, "qkv_bias": False, **_NO_OTHER_BIAS}),
        ),
        replace(
            _ROPE_NAMES,
            layer={
                **_ROPE_LAYER,
                "attention.qkv": Stacked("self_attn.qkv_proj"),
                "mlp.gate_up": "mlp.gate_up_proj",
            },
        ),
        idle=frozenset({"original_max_position_embeddings"}),
    ),
    StockClass(
        "GraniteForCausalLM",
        "granite",
        "granite",
        (
            *_rope_traits(32000, 4096, 11008, 32, 32, None),
            HeadDim(None),
            Rope(),
            AttentionBias(),
            Value("mlp_bias", "mlp_bias", False),
            Value("embedding_multiplier", "embedding_multiplier", 1.0, "embedding_factor"),
            Value("attention_multiplier", "attention_multiplier", 1.0, "attention_factor"),
            Value("residual_multiplier", "residual_multiplier", 1.0),
            Value("logits_scaling", "logits_scaling", 1.0),
            Always({"qk_norm": False, "sliding_window": None}),
        ),
        _ROPE_NAMES,
    ),
    StockClass(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        "gpt_neox",
        (
            Value("vocab_size", "vocab_size", 50432),
            Value("hidden_size", "hidden_size", 6144),
            Value("intermediate_size", "ffn_hidden_size", 24576),
            Value("num_hidden_layers", "num_layers", 44),
            Value("num_attention_heads", "num_heads", 64),
            Value("layer_norm_eps", "norm_eps", 1e-5),
            Value("initializer_range", "init_std", 0.02),
            Value("attention_dropout", "attention_dropout", 0.0),
            NeoXDropout(),
            Value("tie_word_embeddings", "tie_embeddings", False),
            Choice("hidden_act", "activation", _PLAIN, "gelu"),
            Value("use_parallel_residual", "parallel_residual", True),
            AttentionBias(True),
            Rope(
                partial=True,
                share=0.25,
                older={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
            ),
            Always(
                {
                    "norm": "layernorm",
                    "positions": "rope",
                    "mlp_bias": True,
                    "qk_norm": False,
                    "sliding_window": None,
                    "num_kv_heads": None,
                    "head_dim": None,
                }
            ),
            *_NO_DECODER_OF_ANOTHER,
        ),
        Names(
            outside={
                "embedding": "gpt_neox.embed_in",
                "final_norm": "gpt_neox.final_layer_norm",
                "head": "embed_out",
            },
            prefix="gpt_neox.layers.{}.",
            layer={
                "attention_norm": "input_layernorm",
                "attention.qkv": "attention.query_key_value",
                "attention.out": "attention.dense",
                "mlp_norm": "post_attention_layernorm",
                "mlp.up": "mlp.dense_h_to_4h",
                "mlp.down": "mlp.dense_4h_to_h",
            },
            base="gpt_neox.",
            ignored=(r"(.*\.)?attention\.(masked_)?bias", r"(.*\.)?rotary_emb\.inv_freq"),
        ),
        idle=frozenset({"classifier_dropout", "is_decoder", "rope_pct"}),
    ),
)


def class_of(entries: Mapping[str, Any]) -> StockClass:
    """The row of a config.json. Raises CheckpointError for a class that is not known."""
    named, kind = entries.get("architectures"), entries.get("model_type")
    for row in CLASSES:
        is_named = isinstance(named, list) and row.name in named
        if (is_named or not named) and (kind == row.model_type or (is_named and kind is None)):
            return row
    raise CheckpointError(
        f"config.json: architectures = {named!r}, model_type = {kind!r}: no class that is known; "
        f"known are {', '.join(f'{row.name} ({row.model_type})' for row in CLASSES)}"
    )


def class_for(model: ModelConfig) -> StockClass:
    """The row that can hold a model, its family's first. Raises CheckpointError if none can."""
    rows = sorted(CLASSES, key=lambda row: row.family != model.family)
    for row in rows:
        if not row.why_not(model):
            return row
    lacks = ", ".join(rows[0].why_not(model))
    raise CheckpointError(f"{rows[0].name} has no {lacks}, nor has another class that is known")


def read_model(
    entries: Mapping[str, Any], ignore: frozenset[str]
) -> tuple[StockClass, ModelConfig]:
    """The class and the settings of [model] of a config.json, with a vocabulary without padding.

    Raises CheckpointError, all problems at once, for values that megalite cannot follow and for
    keys that it does not know, unless `ignore` names them.
    """
    row = class_of(entries)
    settings, file = row.settings(entries)
    problems = [f"config.json: {problem}" for problem in file.problems]
    known = file.read | IDLE | row.idle | {row.positions_key} | ignore
    problems += [
        f"config.json: {key} = {value!r} is not known for {row.name}; if it changes nothing, add "
        f"--ignore {key}"
        for key, value in entries.items()
        if key not in known
    ]
    if not file.problems:
        try:
            model = ModelConfig(**settings, vocab_pad_multiple=1)
        except ValidationError as error:
            for one in error.errors():
                name = ".".join(["model", *map(str, one["loc"])])
                problems.append(f"config.json: {name} = {one['input']!r}: {one['msg']}")
    if problems:
        raise CheckpointError("\n".join(problems))
    return row, model


def weights_config(
    model: ModelConfig, seq_length: int = 1, tokenizer: str | None = None
) -> RunConfig:
    """A config for weights that no run made: the model, and a run of no steps."""
    data = DataConfig(path="none", seq_length=seq_length, tokenizer=tokenizer)
    return RunConfig(
        name="weights", model=model, data=data, train=TrainConfig(steps=0, global_batch=1)
    )
