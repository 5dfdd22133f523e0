"""The stock transformers classes, filled with a model's own weights by the product's table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megalite.config import ModelConfig
from megalite.exchange.classes import class_for
from megalite.exchange.tensors import parts_of


def stock_model(
    config: ModelConfig, max_positions: int, attention: str = "sdpa"
) -> PreTrainedModel:
    """The untrained stock model of the same shape, in float64, without dropout."""
    row = class_for(config)
    # an embedding's row of padding would have no gradient
    keys: dict[str, Any] = {row.positions_key: max_positions, "pad_token_id": None}
    keys |= row.write(config)
    theirs = AutoConfig.for_model(**keys)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation=attention)
    assert type(model).__name__ == row.name
    return model.double().eval()


def as_theirs(config: ModelConfig, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients, by global name) under the stock model's names."""
    tensors, without = parts_of(config, class_for(config).names)
    assert not without
    found: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        for part in tensors[name]:
            if part.name not in found:
                found[part.name] = tensor.new_zeros(part.shape)
            part.view(found[part.name]).copy_(tensor[part.box.slices()])
    # one class has its head under another name in files than in memory
    return {name.replace("embed_out.", "lm_head."): tensor for name, tensor in found.items()}


def fill(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Give the stock model these weights; every one of its parameters must be among them."""
    named: dict[str, nn.Parameter] = dict(model.named_parameters())
    assert named.keys() == weights.keys(), named.keys() ^ weights.keys()
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(weights[name])
