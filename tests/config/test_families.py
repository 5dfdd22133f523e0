"""Model families in configs: their defaults, switches, settings without effect, checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.checks.settings import check_config
from megalite.config import RunConfig
from megalite.config.effect import unreached
from megalite.config.families import FAMILIES, family_defaults
from megalite.config.load import load_config
from megalite.config.names import keys
from megalite.config.text import to_toml
from megalite.errors import ConfigError
from tests.checks.test_settings import config

FAMILY_NAMES = list(FAMILIES)


def of(family: str, **settings: Any) -> RunConfig:
    return config(model__family=family, **settings)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_family_gives_the_defaults_and_every_one_can_be_set(family: str) -> None:
    model = of(family).model
    defaults = family_defaults(family)
    assert {key: getattr(model, key) for key in defaults} == defaults
    assert of(family, model__norm_eps=0.5, model__qk_norm=True).model.norm_eps == 0.5
    other = {"layernorm": "rmsnorm", "rmsnorm": "layernorm"}[model.norm]
    assert of(family, model__norm=other).model.norm == other
    assert check_config(of(family)) == []


def test_families_are_what_they_were_published_as() -> None:
    gpt2, qwen2, qwen3, mistral = (of(f).model for f in ("gpt2", "qwen2", "qwen3", "mistral"))
    assert (gpt2.norm, gpt2.positions, gpt2.activation) == ("layernorm", "learned", "gelu_tanh")
    assert (gpt2.qkv_bias, gpt2.attention_out_bias, gpt2.mlp_bias) == (True, True, True)
    assert gpt2.tie_embeddings
    assert gpt2.has_dropout
    assert (qwen2.qkv_bias, qwen2.attention_out_bias, qwen2.mlp_bias) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_size) == (False, True, 128)
    assert mistral.sliding_window == 4096
    assert not of("llama").model.has_dropout


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}, {"sliding_window": None}])
def test_a_written_config_loads_back_equal(family: str, changes: dict, tmp_path: Path) -> None:
    before = of(family, **{f"model__{key}": value for key, value in changes.items()})
    (tmp_path / "run.toml").write_text(to_toml(before))
    loaded = load_config(tmp_path / "run.toml")
    assert loaded.config == before
    assert check_config(loaded.config, origins=loaded.origins) == []


@pytest.mark.parametrize(
    ("family", "key", "value", "reason"),
    [
        ("gpt2", "rope_theta", 500.0, "model.positions=learned turns nothing"),
        ("gpt2", "rope_fraction", 0.5, "model.positions=learned turns nothing"),
        ("gpt2", "rope_scaling", "llama3", "model.positions=learned turns nothing"),
        ("gpt2", "rope_factor", 4.0, "nothing scales the rotation"),
        ("llama", "rope_factor", 4.0, "nothing scales the rotation"),
        ("qwen2", "rope_low_freq_factor", 2.0, "only one kind of scaling uses it"),
        ("qwen3", "rope_high_freq_factor", 5.0, "only one kind of scaling uses it"),
        ("llama", "rope_original_max_position", 10, "only two kinds of scaling use it"),
        ("llama", "rope_beta_fast", 10.0, "only one kind of scaling uses it"),
        ("llama", "rope_attention_factor", 1.1, "only one kind of scaling uses it"),
        ("mistral", "max_positions", 64, "model.positions=rope keeps no table"),
    ],
)
def test_settings_without_effect_are_refused(
    family: str, key: str, value: Any, reason: str
) -> None:
    (line,) = check_config(of(family, **{f"model__{key}": value}))
    assert line.startswith(f"model.{key}=")
    assert "has no effect" in line
    assert reason in line


@pytest.mark.parametrize("window", [31, 32, 4096])
@pytest.mark.parametrize("origin", ["base models/m.toml", "run.toml", "override"])
def test_a_trait_is_no_error_at_a_length_that_it_does_not_change(window: int, origin: str) -> None:
    """A published model can be tried with short sequences, as it is written."""
    tried = of(
        "mistral",
        model__sliding_window=window,
        model__rope_scaling="llama3",
        model__rope_original_max_position=131072,
    )
    written = ("model.sliding_window", "model.rope_original_max_position")
    origins = dict.fromkeys(keys(), "default") | dict.fromkeys(written, origin)
    assert check_config(tried, origins=origins) == []
    learned = of("gpt2", model__max_positions=131072)
    assert check_config(learned) == []
    idle = f"model.sliding_window={window} is not shorter than data.seq_length=32: it hides nothing"
    assert unreached(tried, 100) == ([idle] if window >= 32 else [])


def test_a_family_default_is_nobodys_setting() -> None:
    """qwen2's rope_theta differs from llama's, mistral's window is longer than the sequences."""
    for family in ("qwen2", "mistral"):
        assert check_config(of(family)) == []
    assert check_config(of("qwen2", model__positions="learned", model__max_positions=32)) == []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"model__family": "gpt2", "model__max_positions": 31},
            "data.seq_length=32 is more than model.max_positions=31; use at most 31 tokens, or "
            "model.max_positions=32",
        ),
        (
            {
                "model__rope_scaling": "llama3",
                "model__rope_low_freq_factor": 4.0,
                "model__rope_high_freq_factor": 4.0,
            },
            "model.rope_low_freq_factor=4 is not below model.rope_high_freq_factor=4; "
            "use for example 1 and 4",
        ),
        (
            {
                "model__rope_scaling": "yarn",
                "model__rope_beta_slow": 40.0,
            },
            "model.rope_beta_slow=40 is not below model.rope_beta_fast=32; use for example 1 "
            "and 32",
        ),
        (
            {"model__rope_scaling": "yarn", "model__rope_theta": 1.0},
            "model.rope_scaling=yarn needs model.rope_theta above 1, got 1; use for example 10000",
        ),
        (
            {"model__rope_fraction": 0.4},
            "model.rope_fraction=0.4 of 8 elements a head is 3.2, but rotary embedding turns "
            "pairs; use 0.25 or 0.5",
        ),
        (
            {"model__head_dim": 7},
            "model.head_dim=7 is odd, but rotary embedding turns pairs; use 6 or 8",
        ),
    ],
)
def test_traits_that_do_not_fit(settings: dict[str, Any], line: str) -> None:
    assert check_config(config(**settings)) == [line]


def test_a_share_that_binary_fractions_miss_by_a_hair_is_fine() -> None:
    settings = config(model__rope_fraction=0.14, model__head_dim=100)
    assert check_config(settings) == []
    assert settings.model.rotary_size == 14


def test_an_odd_head_is_fine_where_nothing_turns() -> None:
    assert check_config(of("gpt2", model__head_dim=7)) == []


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_key_heads_fewer_than_tp_are_refused_with_both_numbers(family: str) -> None:
    (line,) = check_config(of(family, parallel__tp=8, model__num_kv_heads=4))
    assert line.startswith(
        "parallel.tp=8 is more than model.num_kv_heads=4; use parallel.tp=1, 2 or 4"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm", "batchnorm"),
        ("positions", "alibi"),
        ("activation", "relu"),
        ("attention_dropout", 1.0),
        ("residual_dropout", -0.1),
        ("rope_fraction", 0.0),
        ("rope_factor", 0.5),
        ("rope_scaling", "dynamic"),
        ("rope_scaling", "ntk"),
        ("residual_multiplier", 0.0),
        ("embedding_multiplier", "sqrt"),
        ("embedding_multiplier", -1.0),
        ("sliding_window", 0),
        ("max_positions", 0),
        ("family", "gpt3"),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(of("llama")))
    with pytest.raises(ConfigError, match=f"model.{key}"):
        load_config(tmp_path / "run.toml", [f"model.{key}={value}"])


@pytest.mark.parametrize("value", ["dynamic", "longrope"])
def test_a_scaling_that_depends_on_the_text_is_refused_by_name(value: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(of("llama")))
    with pytest.raises(ConfigError, match=f"model.rope_scaling.*{value} turns a token by another"):
        load_config(tmp_path / "run.toml", [f"model.rope_scaling={value}"])


def test_an_embedding_multiplier_is_a_number_or_the_root_of_the_width(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(of("llama", model__embedding_multiplier=12.0)))
    for given, factor in (("2.5", 2.5), ("3", 3.0), ("none", 8.0)):
        loaded = load_config(tmp_path / "run.toml", [f"model.embedding_multiplier={given}"]).config
        assert loaded.model.embedding_factor == factor
        (tmp_path / "again.toml").write_text(to_toml(loaded))
        assert load_config(tmp_path / "again.toml").config == loaded


def test_kinds_of_layers_repeat_over_the_model() -> None:
    settings: dict[str, Any] = {
        "model__sliding_window": 7,
        "model__rope_local_theta": 5.0,
        "model__layers": ["window", "full", "window_nope"],
    }
    tried = of("llama", **settings)
    assert check_config(tried) == []
    windows = [(kind.window, kind.rotation) for kind in tried.model.kinds]
    three = [(7, "local"), (None, "global"), (7, "none")]
    assert windows == [three[layer % 3] for layer in range(8)]
    assert {kind.rotation for kind in of("gpt2").model.kinds} == {"none"}
    assert {kind.window for kind in of("mistral").model.kinds} == {4096}


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"layers": ["window", "full"]}, "model.layers has layers with a window, but model.slid"),
        ({"layers": ["full"] * 9}, "model.layers has 9 kinds, more than model.num_layers=8; give"),
        ({"layers": ["full_nope"], "positions": "learned"}, "model.layers has layers without rot"),
        ({"layers": ["full"], "sliding_window": 8}, "model.sliding_window=8 has no effect: no lay"),
        (
            {"rope_local_theta": 5.0},
            "model.rope_local_theta=5 has no effect: no layer has a window",
        ),
        ({"qk_norm_over": "projection"}, "model.qk_norm_over=projection has no effect: queries an"),
        (
            {"parallel_residual": True, "norm_place": "after"},
            "model.parallel_residual=true needs model.norm_place=before, got after; change one of",
        ),
    ],
)
def test_kinds_and_parts_of_layers_that_do_not_fit(settings: dict[str, Any], start: str) -> None:
    (line,) = check_config(of("llama", **{f"model__{key}": v for key, v in settings.items()}))
    assert line.startswith(start)
