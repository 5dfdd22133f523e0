"""A config written as TOML loads back equal; the table names every value and its origin."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.checks.settings import check_config, resolve
from megalite.config import RunConfig
from megalite.config.load import load_config
from megalite.config.names import keys, toml_value
from megalite.config.text import format_config, to_toml

SMALL: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "ffn_hidden_size": 128,
        "vocab_size": 131,
    },
    "data": {"seq_length": 32},
    "train": {"steps": 100, "global_batch": 16},
}


def small(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {name: SMALL.get(name, {}) | sections.get(name, {}) for name in {**SMALL, **sections}}
    )


def reload(config: RunConfig, folder: Path) -> RunConfig:
    path = folder / "config.toml"
    path.write_text(to_toml(config))
    return load_config(path).config


@pytest.mark.parametrize(
    "config",
    [
        small(),
        small(optimizer={"clip_grad": None, "lr": 1e-22, "zero": 0, "lr_schedule": "constant"}),
        small(optimizer={"non_finite": "skip", "max_skips": 3}, eval={"interval": 5}),
        small(parallel={"pp": 2, "vpp": 2, "stage_layers": [2, 0, 1, 1]}),
        small(data={"path": 'a "quoted" \\ path\x7f\u2028é', "split": (1.0, 0.0)}),
        small(model={"rope_theta": 1e22, "num_kv_heads": 2}),
        small(
            data={
                "sources": [{"path": "a/web", "weight": 2e-5}, {"path": "b", "name": "code"}],
                "split": "969,30,1",
            },
            eval={"interval": 3, "sets": [{"name": "books", "path": "c"}]},
        ),
        small(
            optimizer={
                "groups": [
                    {"match": "*.bias", "weight_decay": 0.0},
                    {"match": "embedding.weight", "lr_scale": 0.5},
                ]
            }
        ),
    ],
)
def test_what_is_written_loads_back_equal_and_valid(config: RunConfig, tmp_path: Path) -> None:
    assert reload(config, tmp_path) == config
    full = resolve(config)
    path = tmp_path / "full.toml"
    path.write_text(to_toml(full))
    loaded = load_config(path)
    assert loaded.config == full
    assert check_config(loaded.config, origins=loaded.origins) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
        lambda t: not t.endswith((".bin", ".idx")) and t not in ("none", "null")
    ),
    number=st.floats(min_value=0, allow_infinity=False, allow_subnormal=True),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_text_and_number_survives(text: str, number: float, seed: int, tmp_path: Path) -> None:
    config = small(
        data={"path": text}, train={"seed": seed}, optimizer={"lr": number, "bucket_mb": 1.5}
    )
    assert reload(config, tmp_path) == config


@settings(max_examples=50)
@given(st.recursive(st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(
    st.characters(exclude_categories=["Cs"])), st.lists))  # fmt: skip
def test_toml_value_is_toml(value: Any) -> None:
    assert tomllib.loads(f"value = {toml_value(value)}") == {"value": value}


def test_the_table_has_each_key_with_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(small()))
    loaded = load_config(path, ["optimizer.clip_grad=none"])
    lines = format_config(loaded).splitlines()
    assert [line.split()[0] for line in lines] == list(keys())
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["optimizer.clip_grad"] == ['"none"', "override"]
    assert rows["train.steps"] == ["100", str(path)]
    assert rows["eval.batches"] == ['"none"', "default"]
