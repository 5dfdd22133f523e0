"""Dynamic loss scaling: when the scale moves, and what the optimizer does with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.config import OptimizerConfig
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.optim.loss_scale import LossScaler
from megalite.optim.norm import NonFiniteGradientError
from tests.optim.kit.synthetic import accumulate, make, train


def scaler(**settings: Any) -> LossScaler:
    config = {"loss_scale": 16.0, "loss_scale_interval": 3, "loss_scale_hysteresis": 2, **settings}
    return LossScaler(OptimizerConfig.model_validate(config), enabled=True)


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each of "+" (finite) and "-" (not finite) steps."""
    found = []
    for step in steps:
        if step == "+":
            scaler.good_step()
        else:
            scaler.bad_step()
        found.append(scaler.scale)
    return found


def test_the_scale_grows_after_an_interval_and_backs_off_after_hysteresis() -> None:
    assert scales(scaler(), "+++++++") == [16, 16, 32, 32, 32, 64, 64]
    # one bad step is forgiven, and ends the row of good ones; from the second on each halves
    assert scales(scaler(), "++-+--+++-") == [16, 16, 16, 16, 8, 4, 4, 4, 8, 8]
    assert scales(scaler(loss_scale_hysteresis=1, loss_scale_backoff=0.25), "--") == [4, 1]


def test_the_scale_has_a_floor_and_a_ceiling() -> None:
    low = scaler(loss_scale_min=8.0, loss_scale_hysteresis=1)
    assert low.bad_step()
    assert low.scale == 8
    assert not low.bad_step()  # nothing smaller to try
    assert low.scale == 8
    assert scales(scaler(loss_scale=2.0**64, loss_scale_interval=1), "+") == [2.0**64]


def test_state_comes_back() -> None:
    first = scaler()
    scales(first, "+-++")
    second = scaler()
    second.load(first.state())
    assert scales(first, "+--") == scales(second, "+--") == [32, 32, 16]
    off = LossScaler(OptimizerConfig(), enabled=False)
    assert (off.scale, off.state(), off.bad_step()) == (1.0, {}, False)


@pytest.mark.parametrize("clip", [None, 0.1, 1e9])
def test_gradients_are_unscaled_before_norm_and_clipping(clip: float | None) -> None:
    """The drawn gradients stand for scaled ones: a scale of 8 means gradients of an eighth."""
    mesh = Mesh(Topology())
    plain, scaled = (
        make(mesh, torch.float16, clip_grad=c, loss_scale=scale)
        for scale, c in ((1.0, None if clip is None else 8 * clip), (8.0, clip))
    )
    (one,), (eighth,) = train(*plain, mesh, 1), train(*scaled, mesh, 1)
    assert eighth.grad_norm == one.grad_norm / 8
    assert eighth.clip_coefficient == pytest.approx(one.clip_coefficient, rel=1e-6)
    assert (one.loss_scale, eighth.loss_scale) == (1.0, 8.0)
    for a, b in zip(plain[1].named_grads(), scaled[1].named_grads(), strict=True):
        assert torch.allclose(a.tensor, 8 * b.tensor, rtol=1e-6, atol=0)


def test_a_bad_step_changes_the_scale_only_and_the_settings_rule_at_the_floor() -> None:
    mesh = Mesh(Topology())
    chunks, optimizer = make(
        mesh, torch.float16, loss_scale=4.0, loss_scale_min=2.0, loss_scale_hysteresis=1,
        ema_decay=0.5, non_finite="stop",
    )  # fmt: skip
    train(chunks, optimizer, mesh, 1)
    before = [s.tensor.clone() for s in optimizer.named_state()]
    accumulate(chunks, optimizer, mesh, 1, poison={"layers.2.down": math.inf})
    result = optimizer.step(0.01)
    assert (result.skipped, result.num_updates, result.loss_scale) == (True, 1, 4.0)
    assert optimizer.loss_scale == 2.0
    after = [s.tensor for s in optimizer.named_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    accumulate(chunks, optimizer, mesh, 1, poison={"layers.2.down": math.inf})
    with pytest.raises(NonFiniteGradientError, match="at the smallest loss scale 2"):
        optimizer.step(0.01)
