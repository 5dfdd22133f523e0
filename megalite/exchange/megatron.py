"""Megatron-Core's tensor names, for folders of safetensors that hold them beside a config.json.

Its packing is ours: `linear_qkv` is [group, query heads and key and value, head], `linear_fc1`
[gate, up]. Two tables, as its layers with Transformer Engine keep the norms inside the linears.
"""

from __future__ import annotations

from collections.abc import Mapping

from megalite.exchange.tensors import Names, Theirs

_OUTSIDE: Mapping[str, Theirs] = {
    "embedding": "embedding.word_embeddings",
    "position": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "head": "output_layer",
}
_LAYER: Mapping[str, Theirs] = {
    "attention.qkv": "self_attention.linear_qkv",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.out": "self_attention.linear_proj",
    "mlp.gate_up": "mlp.linear_fc1",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
_LOCAL: Mapping[str, Theirs] = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
}
_PREFIX, _IGNORED = "decoder.layers.{}.", (r".*\._extra_state",)
_FUSED: Mapping[str, Theirs] = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
}

# The first is written.
MEGATRON_CORE: tuple[Names, ...] = tuple(
    Names(_OUTSIDE, _PREFIX, {**_LAYER, **norms}, ignored=_IGNORED, padded=True)
    for norms in (_FUSED, _LOCAL)
)
