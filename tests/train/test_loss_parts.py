"""z-loss and label smoothing in a run: what is logged, what moves, the same at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    lines,
    losses,
    make_config,
    train,
    world_size,
    write_tokens,
)

EXACT: dict[str, Any] = {
    "train__dtype": "float64",
    "train__steps": 3,
    "data__document_masks": True,  # ragged: labels at a document's end do not count
}
EXTRAS: dict[str, Any] = {"train__z_loss": 1e-2, "train__label_smoothing": 0.1, **EXACT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loss-parts")
    write_tokens(path / "data", 3 * GLOBAL_BATCH)
    return path


def run(pool: RankPool, folder: Path, name: str, layout: str = "serial", **changes: Any) -> None:
    config = make_config(folder, name, layout, **changes)
    for (outcome,) in pool.run(train, world_size(config), [(config, None)]):
        assert outcome.code == 0, outcome.error


def test_the_loss_stays_the_cross_entropy_and_z_loss_stands_beside_it(
    pool: RankPool, folder: Path
) -> None:
    run(pool, folder, "plain", **EXACT)
    run(pool, folder, "z", train__z_loss=1e-2, **EXACT)
    plain, z = (lines(folder / name, "step") for name in ("plain", "z"))
    assert "z_loss" not in plain[0]
    assert z[0]["loss"] == plain[0]["loss"]  # the same bits: the same weights, the same formula
    # before training all logits are near 0, so that log-sum-exp is near ln 97
    assert z[0]["z_loss"] == pytest.approx(1e-2 * 4.5747**2, rel=0.05)
    assert z[0]["grad_norm"] != plain[0]["grad_norm"]
    assert z[2]["loss"] != plain[2]["loss"]


@pytest.mark.long
def test_extras_are_the_same_at_every_layout(pool: RankPool, folder: Path) -> None:
    run(pool, folder, "serial", **EXTRAS)
    layouts: dict[str, dict[str, Any]] = {
        "tp2": {"train__loss_chunk_tokens": 7},
        "interleaved": {"train__micro_batch": 2, "train__recompute": "stage"},
        "zero1": {"train__micro_batch": 2},
    }
    for layout, changes in layouts.items():
        run(pool, folder, layout, layout, **EXTRAS, **changes)
        for key in ("loss", "z_loss", "grad_norm"):
            got, want = (
                [line[key] for line in lines(folder / name, "step")] for name in (layout, "serial")
            )
            assert got == pytest.approx(want, rel=PARITY_FLOAT64), (layout, key)


def test_validation_is_the_plain_loss(pool: RankPool, folder: Path) -> None:
    write_tokens(folder / "more", 40, seed=3)
    validated: dict[str, Any] = {
        **EXACT,
        "optimizer__lr": 0.0,
        "data__path": str(folder / "more"),
        "data__split": (0.8, 0.2),
        "eval__interval": 1,
    }
    extras: dict[str, Any] = {"train__z_loss": 0.5, "train__label_smoothing": 0.5}
    run(pool, folder, "validated", **validated)
    run(pool, folder, "validated-extras", **validated, **extras)
    plain, with_extras = (
        [line["loss"] for line in lines(folder / name, "eval")]
        for name in ("validated", "validated-extras")
    )
    assert with_extras == plain
    assert losses(folder / "validated-extras") != losses(folder / "validated")
