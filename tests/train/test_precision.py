"""float16 runs, averages in evaluation, weights from another run: as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config import RunConfig
from megalite.train.evaluate import evaluate
from megalite.train.loop import Trainer
from tests.pool import RankPool
from tests.tolerances import FLOAT16_UNIT, LAYOUT_LOSSES, PARITY_FLOAT64
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    checkpoint_tensors,
    different,
    lines,
    losses,
    make_config,
    make_trainer,
    step_numbers,
    train,
    train_one,
    world_size,
    write_tokens,
)

# This model's gradients, of 64 tokens a step, fit float16 up to a scale of 2^19.
HALF: dict[str, Any] = {
    "train__dtype": "float16",
    "optimizer__loss_scale": 2.0**21,
    "optimizer__loss_scale_interval": 2,
    "optimizer__loss_scale_hysteresis": 2,
    "checkpoint__interval": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """Data, and the float16 run "half" in one process without a stop."""
    path = tmp_path_factory.mktemp("precision")
    write_tokens(path / "data", 6 * GLOBAL_BATCH)
    ((done,),) = pool.run(train, 1, [(make_config(path, "half", **HALF), None)])
    assert done.code == 0, done.error
    return path


def state(folder: Path, step: int) -> dict[str, Any]:
    manifest = folder / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    found: dict[str, Any] = json.loads(manifest.read_text())["manifest"]["state"]["optimizer"]
    return found


def test_float16_backs_off_until_gradients_fit_and_then_trains(
    pool: RankPool, folder: Path
) -> None:
    half = folder / "half"
    steps, skips = lines(half, "step"), lines(half, "skip")
    # the first is forgiven, two more halve it; after two good steps it is doubled: too much again
    overflowing = [(1, 2.0**21), (2, 2.0**21), (3, 2.0**20), (6, 2.0**20)]
    assert [(s["step"], s["loss_scale"]) for s in skips] == overflowing
    assert [s["count"] for s in skips] == [1, 2, 3, 4]
    assert [s["loss_scale"] for s in steps[3:5]] == [2.0**19] * 2
    assert {s["step"] for s in skips} == {
        s["step"] for s in steps if s["grad_norm"] in ("inf", "nan")
    }
    assert different(checkpoint_tensors(half, 1), checkpoint_tensors(half, 3)) == []
    assert different(checkpoint_tensors(half, 3), checkpoint_tensors(half, 5)) != []
    assert different(checkpoint_tensors(half, 5), checkpoint_tensors(half, 6)) == []
    assert state(half, 6)["num_updates"] == 2
    # the loss is the unscaled one: that of float32 with the same initial weights
    wide = make_config(folder, "wide", train__steps=2)
    pool.run(train, 1, [(wide, None)])
    assert losses(half)[0] == pytest.approx(
        losses(folder / "wide")[0], rel=LAYOUT_LOSSES["float16"]
    )


def test_a_float16_run_resumes_bitwise_between_overflows(pool: RankPool, folder: Path) -> None:
    """The scale and its counters are part of the checkpoint: hysteresis is half used up here."""
    config = make_config(folder, "stopped", **HALF)
    ((stopped, again),) = pool.run(train, 1, [(config, 1), (config, None)])
    assert (stopped.code, again.code, again.first_step) == (75, 0, 1)
    assert step_numbers(folder / "stopped") == step_numbers(folder / "half")
    tensors = (checkpoint_tensors(folder / name, 6) for name in ("stopped", "half"))
    assert different(*tensors) == []
    assert state(folder / "stopped", 6) == state(folder / "half", 6)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2", "zero1"])
def test_every_layout_takes_the_same_decisions(pool: RankPool, folder: Path, layout: str) -> None:
    config = make_config(folder, f"half-{layout}", layout, **HALF)
    done = pool.run(train_one, world_size(config), config)
    assert {outcome.code for outcome in done} == {0}
    keys = ("step", "loss_scale")
    found, wanted = (
        [tuple(line[key] for key in keys) for line in lines(folder / name, "skip")]
        for name in (config.name, "half")
    )
    assert found == wanted
    assert losses(folder / config.name) == pytest.approx(
        losses(folder / "half"), rel=LAYOUT_LOSSES["float16"]
    )


# --- averages ------------------------------------------------------------------------------------

AVERAGED: dict[str, Any] = {
    "optimizer__ema_decay": 0.5,
    "data__split": (0.5, 0.5),
    "train__steps": 3,
    "eval__interval": 3,
    "eval__weights": "ema",
}


def validation_loss(trainer: Trainer) -> float:
    results = evaluate(trainer.engine, trainer.data.sets)
    assert results is not None
    (result,) = results
    return result.loss


def evaluate_by_hand(ctx: Any, config: RunConfig) -> tuple[float, float]:
    """The loss that a run's evaluation reported, and that of weights overwritten by averages."""
    trainer = make_trainer(ctx, config)
    assert trainer.run() == 0
    optimizer = trainer.engine.optimizer
    inside = validation_loss(trainer)
    states = {s.name: s.tensor for s in optimizer.named_state()}
    for name, tensor in states.items():
        if name.startswith("param/"):
            tensor.copy_(states[name.replace("param/", "ema/")])
    optimizer.after_load()
    plain = trainer.config.eval.model_copy(update={"weights": "model"})
    trainer.engine.config = trainer.config.model_copy(update={"eval": plain})
    return inside, validation_loss(trainer)


def test_evaluation_uses_the_average_and_training_does_not_notice(
    pool: RankPool, folder: Path
) -> None:
    averaged = make_config(folder, "averaged", "zero1", **AVERAGED)
    for inside, by_hand in pool.run(evaluate_by_hand, 2, averaged):
        assert inside == by_hand
        assert inside == lines(folder / "averaged", "eval")[-1]["loss"]
    plain = make_config(folder, "plain", "zero1", **AVERAGED | {"eval__weights": "model"})
    pool.run(train_one, 2, plain)
    assert step_numbers(folder / "plain") == step_numbers(folder / "averaged")
    assert lines(folder / "plain", "eval")[-1]["loss"] != inside


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2", "zero1"])
def test_averages_and_momenta_resume_at_another_layout(
    pool: RankPool, folder: Path, layout: str
) -> None:
    options: dict[str, Any] = {
        "train__dtype": "float64",
        "train__steps": 4,
        "optimizer__name": "muon",
        "optimizer__ema_decay": 0.5,
    }
    whole = make_config(folder, f"whole-{layout}", **options)
    part = make_config(folder, f"part-{layout}", **options)
    pool.run(train, 1, [(whole, None), (part, 2)])
    moved = make_config(folder, part.name, layout, **options)
    assert {outcome.first_step for outcome in pool.run(train_one, 2, moved)} == {2}
    found, wanted = (checkpoint_tensors(folder / c.name, 4) for c in (part, whole))
    assert found.keys() == wanted.keys()
    assert {name.split("/")[0] for name in found} == {
        "param", "ema", "momentum", "exp_avg", "exp_avg_sq",
    }  # fmt: skip
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) <= PARITY_FLOAT64 * float(
            tensor.abs().max()
        ), name


# --- weights of another run ----------------------------------------------------------------------


def test_a_run_starts_from_another_runs_weights(pool: RankPool, folder: Path) -> None:
    """Masters follow: under ZeRO-1 and bf16, a tiny step stays by the loaded weights."""
    source = make_config(folder, "source", train__steps=3)
    pool.run(train, 1, [(source, None)])
    loaded = checkpoint_tensors(folder / "source", 3)
    tiny = {"optimizer__lr": 1e-7, "optimizer__warmup_steps": 0, "optimizer__weight_decay": 0.0}
    for dtype in ("bfloat16", "float16"):
        config = make_config(
            folder, f"from-{dtype}", "zero1", train__steps=1, train__dtype=dtype,
            optimizer__ema_decay=0.5, checkpoint__load_weights=str(folder / "source"), **tiny,
        )  # fmt: skip
        assert {outcome.code for outcome in pool.run(train_one, 2, config)} == {0}
        after = checkpoint_tensors(folder / config.name, 1)
        for name, tensor in loaded.items():
            if name.startswith("param/"):
                assert float((after[name] - tensor).abs().max()) <= 2e-7, name
                average = after[name.replace("param/", "ema/")]
                assert torch.allclose(average, tensor, rtol=0, atol=2e-7), name
        # bf16 rounds weights, so the first loss is near, and far from that of initial weights
        first = losses(folder / config.name)[0]
        assert first < losses(folder / "source")[0] - 32 * FLOAT16_UNIT


def test_weights_that_do_not_fit_are_refused_on_every_rank(pool: RankPool, folder: Path) -> None:
    def error(name: str, **changes: Any) -> str:
        config = make_config(folder, name, "dp2", **changes)
        first, second = pool.run(train_one, 2, config)
        assert first.error == second.error
        return first.error

    half = str(folder / "half" / "checkpoints" / "step-00000006")
    tied = error("tied", checkpoint__load_weights=half, model__tie_embeddings=True)
    assert tied.startswith(f"CheckpointError: checkpoint.load_weights={half}: ")
    assert "holds tensors that this run has no place for: param/head.weight; use" in tied
    assert tied.endswith("\nmodel.tie_embeddings is true, saved with false")
    wide = error("wide-vocab", checkpoint__load_weights=half, model__vocab_size=120)
    assert "\nmodel.vocab_size is 120, saved with 97\n" in wide
    assert wide.endswith("all the same with --accept model.vocab_size")
    deep = error("deep", checkpoint__load_weights=half, model__num_layers=3)
    assert "param/layers.3.mlp.gate_up.weight" in deep
    assert deep.endswith("\nmodel.num_layers is 3, saved with 4")
    assert "half/checkpoints holds no checkpoint" not in error(
        "fine", checkpoint__load_weights=str(folder / "half" / "checkpoints"), train__steps=0
    )
    empty = folder / "empty"
    empty.mkdir()
    assert "holds no checkpoint; give a checkpoint, or the folder of a run" in error(
        "none", checkpoint__load_weights=str(empty)
    )
