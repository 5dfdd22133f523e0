"""Every family against its stock class in transformers: logits and every gradient, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from tests.model.kit import hugging_face
from tests.model.kit.small import (
    VARIANTS,
    gradients,
    make_batch,
    make_stage,
    model_config,
    plain_gain,
    plain_rates,
    relative_error,
)
from tests.tolerances import PLAIN_FLOAT64, STOCK_FLOAT32

LENGTH = 8  # tests.model.kit.small.SEQ_LENGTH
STOCK = [
    *("llama", "llama3", "gpt2", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "olmo3"),
    *("gemma3", "phi3", "granite", "gpt_neox"),
]
NO_DROPOUT = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0)


class ExactRotation(nn.Module):
    """Their tables, which they compute in float32, in float64."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str = "full_attention", **_: Any
    ) -> tuple[Tensor, Tensor]:
        local = self.config.rope_local_theta if layer_type == "sliding_attention" else None
        gain = plain_gain(self.config) if local is None else 1.0
        angle = position_ids[..., None] * plain_rates(self.config, local)
        angle = torch.cat([angle, angle], -1)
        return angle.cos() * gain, angle.sin() * gain


def exact_norm(module: Any, x: Tensor) -> Tensor:
    """Their RMSNorm without its cast to float32."""
    zero_centered = type(module).__name__ == "Gemma3RMSNorm"
    eps = module.eps if zero_centered else module.variance_epsilon
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (module.weight + 1 if zero_centered else module.weight) * (x * scale)


def outcome(variant: str, tied: bool, exact: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Logits, loss and gradients, ours and theirs, under their names."""
    config = model_config(**{**VARIANTS[variant], **NO_DROPOUT, "tie_embeddings": tied})
    model, batch = make_stage(config), make_batch()
    theirs = hugging_face.stock_model(config, max_positions=64)
    weights = {s.name: p.detach() for p, s in model.named_params()}
    hugging_face.fill(theirs, hugging_face.as_theirs(config, weights))
    if exact and config.positions == "rope":
        theirs.base_model.rotary_emb = ExactRotation(config)
        for module in theirs.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(exact_norm, module)

    model(None, batch).backward()
    ours = hugging_face.as_theirs(config, gradients(model))
    ours["logits"] = torch.cat([model.logits(t) for t in batch.token_T.split(LENGTH)])

    logits = theirs(batch.token_T.view(-1, LENGTH)).logits.flatten(0, 1)
    losses = F.cross_entropy(logits, batch.label_T, reduction="none")
    (losses * batch.weight_T).sum().backward()
    want = {name: param.grad for name, param in theirs.named_parameters()}
    return ours, {**want, "logits": logits.detach()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", STOCK)
def test_family_equals_the_stock_class(variant, tied) -> None:
    ours, theirs = outcome(variant, tied, exact=True)
    assert ours.keys() == theirs.keys()
    assert_equal(ours, theirs, PLAIN_FLOAT64)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    for name, want in theirs.items():
        # alone, a key's bias moves all scores of a query alike: what is left of it is rounding
        noise = 1e-13 if name.endswith("k_proj.bias") else 0.0
        assert relative_error(ours[name], want) <= bound or (
            (ours[name] - want).abs().max() <= noise
        ), name


@pytest.mark.parametrize("variant", [v for v in STOCK if v != "gpt2"])
def test_family_equals_the_stock_class_as_it_is(variant) -> None:
    ours, theirs = outcome(variant, tied=False, exact=False)
    assert_equal(ours, theirs, STOCK_FLOAT32)
