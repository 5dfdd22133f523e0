"""Number formats and optimizer options that do not fit each other: one line each."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megalite.checks.settings import check_config
from megalite.config import GroupConfig
from tests.checks.test_settings import config


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"train__dtype": "float16", "optimizer__loss_scale": 8.0,
          "optimizer__loss_scale_min": 16.0},
         "optimizer.loss_scale_min=16 is above optimizer.loss_scale=8; use at most 8"),
        ({"optimizer__moment_dtype": "bfloat16", "optimizer__beta2": 0.999},
         "optimizer.beta2=0.999 changes a moment by less than bfloat16 can say in a step; "
         "use at most 0.992188, or optimizer.moment_dtype=float32"),
        ({"optimizer__name": "muon", "optimizer__moment_dtype": "bfloat16",
          "optimizer__muon_momentum": 0.995},
         "optimizer.muon_momentum=0.995 changes a moment by less than bfloat16 can say in a step; "
         "use at most 0.992188, or optimizer.moment_dtype=float32"),
        ({"optimizer__groups": [{"match": "layers.0.*", "algorithm": "adamw"}]},
         "optimizer.groups[0].algorithm=adamw has no effect: optimizer.name=adamw has one "
         "algorithm; remove it or set optimizer.name=muon"),
        ({"optimizer__loss_scale": 8.0},
         "optimizer.loss_scale=8 has no effect: only train.dtype=float16 scales the loss; "
         "remove it or set train.dtype=float16"),
        ({"optimizer__muon_scale": "spectral"},
         "optimizer.muon_scale=spectral has no effect: optimizer.name=adamw does not use it; "
         "remove it or set optimizer.name=muon"),
        ({"optimizer__name": "muon", "train__dtype": "float64",
          "optimizer__muon_dtype": "bfloat16"},
         "optimizer.muon_dtype=bfloat16 has no effect: only optimizer.name=muon iterates, and "
         "with train.dtype=float64 it does so in float64; remove it"),
        ({"train__dtype": "bfloat16", "train__tf32": True},
         "train.tf32=true has no effect: only float32 products can use TF32; "
         "remove it or set train.dtype=float32"),
        ({"parallel__dp": 1, "optimizer__grad_reduce_dtype": "bfloat16"},
         "optimizer.grad_reduce_dtype=bfloat16 has no effect: parallel.dp=1 reduces no gradients; "
         "remove it or set parallel.dp >= 2"),
        ({"optimizer__eps": 1e-50},
         "optimizer.eps=1e-50 is 0 in float32; use 1.2e-38 or more, such as 1e-8"),
        ({"model__norm_eps": 1e-46, "train__dtype": "bfloat16"},
         "model.norm_eps=1e-46 is 0 in float32; use 1.2e-38 or more, such as 1e-8"),
        ({"eval__interval": 5, "eval__weights": "ema"},
         "eval.weights=ema needs an average of the weights, but optimizer.ema_decay is not set; "
         "set it to for example 0.999, or eval.weights=model"),
    ],
)  # fmt: skip
def test_one_mistake_one_line(settings: dict[str, Any], line: str) -> None:
    assert check_config(config(**settings)) == [line]


def test_what_fits_is_accepted() -> None:
    assert check_config(config(train__dtype="float16", optimizer__loss_scale=8.0)) == []
    assert check_config(config(optimizer__moment_dtype="bfloat16", optimizer__beta2=0.99)) == []
    assert check_config(config(optimizer__eps=1e-50, train__dtype="float64")) == []
    groups = [{"match": "layers.0.*", "algorithm": "adamw"}]
    assert check_config(config(optimizer__name="muon", optimizer__groups=groups)) == []


def test_a_group_that_sets_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="sets nothing; give lr_scale, weight_decay or"):
        GroupConfig(match="*")
