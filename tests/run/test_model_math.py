"""Parameters and FLOPs against hand counts and against torch's own counters on a real model."""

from __future__ import annotations

import re
from dataclasses import astuple
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megalite.config import ModelConfig
from megalite.run.model_math import (
    Flops,
    flops_text,
    forward_flops,
    mfu,
    parameter_counts,
    training_flops,
)
from megalite.run.parameters import layer_parameters


def model(**changes: Any) -> ModelConfig:
    sizes = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_heads": 6,
        "num_kv_heads": 2,
        "ffn_hidden_size": 80,
        "vocab_size": 97,
    }
    return ModelConfig(**(sizes | changes))


LLAMA_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
)


class PlainLayer(nn.Module):
    """One Llama layer written the obvious way, every score computed."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        width, kv_width = c.num_heads * c.head_size, c.kv_heads * c.head_size
        self.norm1, self.norm2 = nn.RMSNorm(c.hidden_size), nn.RMSNorm(c.hidden_size)
        self.q = nn.Linear(c.hidden_size, width, bias=False)
        self.k = nn.Linear(c.hidden_size, kv_width, bias=False)
        self.v = nn.Linear(c.hidden_size, kv_width, bias=False)
        self.out = nn.Linear(width, c.hidden_size, bias=False)
        self.gate = nn.Linear(c.hidden_size, c.ffn_hidden_size, bias=False)
        self.up = nn.Linear(c.hidden_size, c.ffn_hidden_size, bias=False)
        self.down = nn.Linear(c.ffn_hidden_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (self.split(p(h)) for p in (self.q, self.k, self.v))
        group = self.c.num_heads // self.c.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.c.head_size)).transpose(1, 2)


class PlainModel(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


SHAPES = [
    {},
    {"num_kv_heads": None},
    {"tie_embeddings": True},
    {"head_dim": 16, "num_kv_heads": 3},
    {"num_layers": 1, "vocab_size": 1031, "ffn_hidden_size": 256},
]


@pytest.mark.parametrize("changes", SHAPES)
def test_parameters_are_those_of_a_real_model(changes: dict[str, Any]) -> None:
    c = model(**changes)
    assert parameter_counts(c).total() == sum(p.numel() for p in PlainModel(c).parameters())


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("seq_length", [16, 65])
def test_flops_are_those_of_a_real_model(changes: dict[str, Any], seq_length: int) -> None:
    c = model(**changes)
    ids = torch.zeros(2, seq_length, dtype=torch.long)
    plain = PlainModel(c)
    with FlopCounterMode(display=False) as forward:
        logits = plain(ids)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    counted = forward.get_total_flops()
    expected = forward_flops(c, seq_length).total_full * ids.numel()
    assert counted == pytest.approx(expected, rel=0.01)
    expected = training_flops(c, seq_length).total_full * ids.numel()
    assert counted + backward.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_parameters_counted_by_hand() -> None:
    counts = parameter_counts(model())
    assert counts["embedding"] == 97 * 48
    assert counts["qkv"] == 3 * 48 * (48 + 16 + 16)
    assert counts["attention_out"] == 3 * 48 * 48
    assert counts["mlp"] == 3 * (48 * 80 + 48 * 80 + 80 * 48)
    assert counts["norm"] == 3 * 2 * 48 + 48
    assert counts["head"] == 97 * 48
    layer = sum(prod(spec.shape) for spec in layer_parameters(model(num_layers=1), 0))
    assert layer + 2 * 97 * 48 + 48 == parameter_counts(model(num_layers=1)).total()


def test_parameters_of_a_published_model() -> None:
    assert parameter_counts(LLAMA_8B).total() == 8_030_261_248


def test_padding_counts_in_storage_only() -> None:
    padded = parameter_counts(model(), padded=True)
    assert padded["embedding"] == padded["head"] == 128 * 48
    assert forward_flops(model(), 16).head == 2 * 97 * 48


def test_a_tied_head_has_no_parameters_but_all_its_flops() -> None:
    tied = model(tie_embeddings=True)
    assert parameter_counts(tied)["head"] == 0
    assert forward_flops(tied, 16) == forward_flops(model(), 16)


def test_flops_by_term_counted_by_hand() -> None:
    flops = forward_flops(model(), 16)
    assert flops == Flops(
        embedding=0,
        qkv=2 * 3 * 48 * 80,
        attention_full=3 * (2 * 48 * 16 + 2 * 48 * 16),
        attention_causal=3 * (48 * 16 + 48 * 16),
        attention_out=2 * 3 * 48 * 48,
        mlp=2 * 3 * 3 * 48 * 80,
        head=2 * 97 * 48,
    )
    assert flops.total_full - flops.total_causal == flops.attention_full // 2
    assert astuple(training_flops(model(), 16)) == tuple(3 * term for term in astuple(flops))


def test_flops_by_term_are_told_in_one_line_that_adds_up() -> None:
    line = flops_text(LLAMA_8B, 8192)
    numbers = [float(n.replace(",", "")) for n in re.findall(r"[\d,]+\.\d+", line)]
    full, causal, qkv, scores, masked, out, mlp, head = numbers
    assert full == pytest.approx(qkv + scores + out + mlp + head, rel=1e-3)
    assert causal == pytest.approx(qkv + masked + out + mlp + head, rel=1e-3)
    assert mlp == pytest.approx(3 * 2 * 3 * 32 * 4096 * 14336 / 1e6, rel=1e-3)


def test_conventions_of_a_published_model_differ_as_published() -> None:
    # Llama 3 8B at 8192 tokens: causal counting gives 0.889 of full, 6 x parameters about 0.78
    flops = training_flops(LLAMA_8B, 8192)
    assert flops.total_causal / flops.total_full == pytest.approx(0.889, abs=0.001)


def test_mfu_in_both_conventions() -> None:
    flops = training_flops(LLAMA_8B, 8192)
    peak = 989.4
    tokens_per_s = 8 * 0.5 * peak * 1e12 / flops.total_full
    got = mfu(tokens_per_s, LLAMA_8B, 8192, peak, num_devices=8)
    assert got is not None
    assert got.full == pytest.approx(0.5)
    assert got.causal == pytest.approx(0.5 * flops.total_causal / flops.total_full)


def test_no_mfu_without_a_known_peak() -> None:
    assert mfu(1000.0, model(), 16, None) is None
