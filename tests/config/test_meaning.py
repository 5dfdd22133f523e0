"""Settings written in another way are no change; the same words for another thing are one."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.resume import may_change
from megalite.run.batch_plan import batch_plan
from megalite.train.changes import changed_settings
from tests.checks.test_settings import config

RAMP = {"train__batch_ramp_start": 8, "train__batch_ramp_increment": 4}
WEB, CODE = {"path": "a/web", "weight": 7}, {"path": "b", "weight": 3, "name": "code"}
SLOW = {"match": "*.bias", "lr_scale": 0.5}
DECAY = {"match": "embedding.weight", "weight_decay": 0.0}


def changes(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Settings that a resume finds changed, those that may change freely left out."""
    old, new = config(**one), config(**other)
    changed = changed_settings(old, new, batch_plan(new), 1)
    return {change.name for change in changed if change.needs != "free"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"model__head_dim": 8}),
        ({"model__num_kv_heads": None}, {"model__num_kv_heads": 8}),
        ({"model__vocab_pad_multiple": 64}, {"model__vocab_pad_multiple": 192}),
        ({}, {"model__vocab_pad_multiple": 256}),
        ({"model__family": "mistral"}, {"model__family": "mistral", "model__sliding_window": None}),
        ({}, {"model__sliding_window": 32}),  # as long as the sequences
        ({}, {"optimizer__decay_steps": 100}),
        ({"train__tokens": 51200, "train__steps": 0}, {}),
        ({"data__split": (0.98, 0.02)}, {"data__split": "98,2,0"}),
        ({**RAMP, "train__batch_ramp_samples": 64}, {**RAMP, "train__batch_ramp_tokens": 2048}),
        (
            {"data__sources": [WEB, CODE]},
            {
                "data__sources": [
                    {"path": "c", "weight": 0.7, "name": "web"},
                    CODE | {"weight": 0.3},
                ]
            },
        ),
        (
            {"data__path": "a"},
            {"data__sources": [{"path": "b", "weight": 5, "name": "data"}]},
        ),
        (
            {"optimizer__groups": [DECAY, SLOW]},
            {"optimizer__groups": [DECAY | {"lr_scale": 1.0}, SLOW]},
        ),
    ],
)
def test_another_way_to_write_the_same_is_no_change(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert changes(one, other) == changes(other, one) == set()


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        ({}, {"model__head_dim": 16}, {"model.head_dim"}),
        ({"model__num_kv_heads": None}, {}, {"model.num_kv_heads"}),
        ({}, {"model__vocab_pad_multiple": 512}, {"model.vocab_pad_multiple"}),
        ({}, {"model__sliding_window": 31}, {"model.sliding_window"}),
        # what follows from another setting is that setting's change
        ({}, {"model__hidden_size": 128}, {"model.hidden_size"}),
        ({"data__split": (0.98, 0.02)}, {"data__split": "98,1,1"}, {"data.split"}),
        ({"data__sources": [WEB, CODE]}, {"data__sources": [CODE, WEB]}, {"data.sources"}),
        (
            {**RAMP, "train__batch_ramp_samples": 64},
            {**RAMP, "train__batch_ramp_tokens": 2016},
            {"train.batch_ramp_samples", "train.batch_ramp_tokens"},
        ),
        (
            {"optimizer__groups": [SLOW, DECAY]},
            {"optimizer__groups": [SLOW, DECAY | {"lr_scale": 1.0}]},
            {"optimizer.groups"},
        ),
    ],
)
def test_another_meaning_is_a_change(
    one: dict[str, Any], other: dict[str, Any], changed: set[str]
) -> None:
    assert changes(one, other) == changes(other, one) == changed
    assert "free" not in {may_change(name) for name in changed}
