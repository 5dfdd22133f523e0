"""The settings in a checkpoint that another version saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.config import saved
from megalite.config.saved import saved_config
from megalite.errors import CheckpointError
from tests.train.kit.runs import make_config


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    return make_config(tmp_path, "run", "dp2").model_dump(mode="json")


def test_a_config_of_this_version_comes_back_the_same(tmp_path: Path) -> None:
    config = make_config(tmp_path, "run", "3d")
    assert saved_config(config.model_dump(mode="json"), "here") == config


def test_settings_that_an_older_version_did_not_have_are_defaults(tree: dict[str, Any]) -> None:
    del tree["kernels"], tree["optimizer"]["muon_nesterov"]
    config = saved_config(tree, "here")
    assert (config.kernels.backend, config.optimizer.muon_nesterov) == ("auto", True)


def test_a_renamed_setting_is_read_by_its_former_name(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "RENAMED", {"optimiser.rate": ("optimizer.lr", "optimizer.min_lr")})
    del tree["optimizer"]["lr"]
    tree["optimiser"] = {"rate": 0.5}
    optimizer = saved_config(tree, "here").optimizer
    assert (optimizer.lr, optimizer.min_lr) == (0.5, 0.5)


def test_a_bias_of_both_blocks_is_one_of_each_now(tree: dict[str, Any]) -> None:
    del tree["model"]["attention_out_bias"], tree["model"]["mlp_bias"]
    tree["model"]["linear_bias"] = True
    model = saved_config(tree, "here").model
    assert (model.attention_out_bias, model.mlp_bias) == (True, True)


def test_a_removed_setting_is_nothing_only_with_the_value_that_stayed(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "REMOVED", {"train.turbo": False})
    tree["train"]["turbo"] = False
    assert saved_config(tree, "here").train.steps == 6
    tree["train"]["turbo"] = True
    with pytest.raises(CheckpointError, match=r"\ntrain\.turbo=true: this version has no such"):
        saved_config(tree, "here")


def test_everything_that_cannot_be_read_is_named_at_once(tree: dict[str, Any]) -> None:
    tree["model"]["twist"] = 3
    tree["later"] = {"a": 1, "b": [2]}
    tree["train"]["dtype"] = "float8"
    with pytest.raises(CheckpointError) as caught:
        saved_config(tree, "runs/x/checkpoints/step-00000001")
    first, *problems = str(caught.value).splitlines()
    assert first.startswith("runs/x/checkpoints/step-00000001 was saved with settings that this")
    assert problems == [
        "model.twist=3: this version has no such setting",
        "later.a=1: this version has no such setting",
        "later.b=[2]: this version has no such setting",
        "train.dtype: Input should be 'float32', 'bfloat16', 'float16' or 'float64'",
    ]


@pytest.mark.parametrize("tree", [None, "name = 'text'", [], {}])
def test_a_manifest_without_settings_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="model"):
        saved_config(tree, "here")
