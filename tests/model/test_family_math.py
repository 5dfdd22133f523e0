"""Parameters and FLOPs of every family: our own model, the stock classes, the published sizes."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.config import ModelConfig
from megalite.config.load import load_config
from megalite.model.dropout import DropoutAt
from megalite.run.model_math import Flops, forward_flops, parameter_counts, training_flops
from tests import ROOT
from tests.model.kit import hugging_face
from tests.model.kit.small import SEQ_LENGTH, VARIANTS, make_batch, make_stage, model_config

MODELS = ROOT / "configs" / "models"
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-3-7b": 7_298_011_136,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "granite-3.0-2b": 2_533_531_648,
    "granite-3.0-8b": 8_170_848_256,
    "pythia-160m": 162_322_944,
    "pythia-1b": 1_011_781_632,
    "pythia-6.9b": 6_857_302_016,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
}


def published(name: str) -> ModelConfig:
    run = {"data": {"seq_length": 1024}, "train": {"steps": 1, "global_batch": 1}}
    overrides = [f"{s}.{k}={v}" for s, section in run.items() for k, v in section.items()]
    return load_config(MODELS / f"{name}.toml", overrides).config.model


def test_every_model_file_is_checked() -> None:
    assert {path.stem for path in MODELS.glob("*.toml")} - {"llama-tiny"} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name) -> None:
    assert parameter_counts(published(name)).total() == PUBLISHED[name]
    family = tomllib.loads((MODELS / f"{name}.toml").read_text())["model"]["family"]
    other = {"gpt_neox": "pythia", "gemma3": "gemma-3", "olmo2": "olmo-2", "olmo3": "olmo-3"}
    assert name.startswith(other.get(family, family.rstrip("23")))


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_of_the_built_model(variant) -> None:
    config = model_config(**VARIANTS[variant])
    built = [spec.shape for _, spec in make_stage(config).named_params()]
    assert parameter_counts(config, padded=True).total() == sum(
        int(torch.tensor(shape).prod()) for shape in built
    )


# Modules of the stock classes whose products make a term.
TERMS = {
    "qkv": (".q_proj", ".k_proj", ".v_proj", ".c_attn", ".qkv_proj", ".query_key_value"),
    "attention_out": (".o_proj", ".attn.c_proj", ".attention.dense"),
    "mlp": (".mlp",),
    "head": (".lm_head",),
}


STOCK = [
    *("llama", "llama3", "gpt2", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "olmo3"),
    *("gemma3", "phi3", "granite", "gpt_neox"),
]
LENGTH = 24


def small(variant: str) -> ModelConfig:
    sizes = {"hidden_size": 32, "num_layers": 3, "ffn_hidden_size": 44, "vocab_size": 101}
    head_dim = None if variant in ("gpt2", "gpt_neox") else 12
    return model_config(
        **{**VARIANTS[variant], **sizes, "max_positions": LENGTH, "head_dim": head_dim}
    )


def count(config: ModelConfig, *, backward: bool) -> FlopCounterMode:
    """torch's counter over the stock class on one sequence; every score is computed."""
    model = hugging_face.stock_model(config, LENGTH, attention="eager").float()
    with FlopCounterMode(display=False) as mode:
        logits = model(torch.zeros(1, LENGTH, dtype=torch.long)).logits
        if backward:
            logits.sum().backward()
    return mode


@pytest.mark.parametrize("variant", STOCK)
def test_flops_by_term_are_those_of_the_stock_class(variant) -> None:
    config = small(variant)
    mode, flops = count(config, backward=False), forward_flops(config, LENGTH)
    by_module = {name: sum(ops.values()) for name, ops in mode.get_flop_counts().items()}
    counted = {
        term: sum(number for name, number in by_module.items() if name.endswith(ends))
        for term, ends in TERMS.items()
    }
    counted["attention_full"] = mode.get_total_flops() - sum(counted.values())
    for term, number in counted.items():
        assert number == pytest.approx(getattr(flops, term) * LENGTH, rel=0.01), term


@pytest.mark.parametrize("variant", STOCK)
def test_training_flops_are_those_of_the_stock_class(variant) -> None:
    config = small(variant)
    want = training_flops(config, LENGTH).total_full * LENGTH
    assert count(config, backward=True).get_total_flops() == pytest.approx(want, rel=0.01)


def in_place_flops(buffer: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    """What torch's list of products lacks: the shapes of buffer.addmm_(a, b)."""
    return 2 * int(a[0]) * int(a[1]) * int(b[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_own_products_are_those_of_the_count(variant) -> None:
    """Forward and backward of the model itself, its attention's products apart (torch counts no
    fused attention on CPU): recompute none, so each product runs once."""
    config = model_config(**{**VARIANTS[variant], "vocab_pad_multiple": 1})
    model, batch = make_stage(config), replace(make_batch(), dropout=DropoutAt(1, 2, 0))
    in_place = {torch.ops.aten.addmm_: in_place_flops}  # weight gradients
    with FlopCounterMode(display=False, custom_mapping=in_place) as mode:
        model(None, batch).backward()
    products = sum(
        number
        for op, number in mode.get_flop_counts()["Global"].items()
        if str(op) in ("aten.mm", "aten.addmm", "aten.addmm_")
    )
    want = training_flops(config, SEQ_LENGTH).matmul_weights * len(batch.token_T)
    assert products == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh", "gelu", "relu2"])
def test_a_gate_is_a_third_matrix(activation) -> None:
    config = model_config(activation=activation)
    matrices = 3 if "glu" in activation else 2
    assert forward_flops(config, 8).mlp == 2 * matrices * config.num_layers * 16 * 20


@pytest.mark.parametrize("window", [None, 1, 100, 128, 511, 512, 4096])
def test_masked_scores_are_those_that_the_mask_leaves(window) -> None:
    """Counted pair by pair, within 1 %."""
    length, config = 512, model_config(sliding_window=window)
    index = torch.arange(length)
    seen = index[:, None] >= index[None, :]
    if window is not None:
        seen &= index[:, None] - index[None, :] < window
    each = 4 * config.num_heads * config.head_size * config.num_layers
    got = forward_flops(config, length).attention_causal * length
    assert got == pytest.approx(each * int(seen.sum()), rel=0.01)


def test_each_layer_counts_with_its_own_window() -> None:
    mixed = model_config(num_layers=3, sliding_window=4, layers=["window", "full"])
    windowed, plain = (model_config(num_layers=1, sliding_window=w) for w in (4, None))
    each = [forward_flops(config, 64).attention_causal for config in (windowed, plain)]
    assert forward_flops(mixed, 64).attention_causal == pytest.approx(2 * each[0] + each[1], abs=1)


def test_masks_never_change_the_full_count() -> None:
    plain, windowed = model_config(), model_config(sliding_window=3)
    full: list[Flops] = [forward_flops(c, 64) for c in (plain, windowed)]
    assert full[0].total_full == full[1].total_full
    assert full[1].total_causal < full[0].total_causal < full[0].total_full
