"""AdamW over flat shards, sums of squares and casts in Triton against float64 and torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels.triton.adamw import adamw_, sum_squares
from megalite.kernels.triton.cast import scale_cast
from tests.kernels.triton.kit.inputs import (
    assert_guards_untouched,
    assert_near,
    assert_same_bits,
    draw,
)

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def hyper(step: int, lr: float = 1e-2, clip: float = 0.5) -> Tensor:
    beta1, beta2 = SETTINGS["beta1"], SETTINGS["beta2"]
    return torch.tensor([lr, 1 - beta1**step, 1 - beta2**step, clip])


def state(length: int, moments: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        draw(length),
        torch.zeros(length, dtype=moments),
        torch.zeros(length, dtype=moments),
        torch.empty(length, dtype=torch.bfloat16),
    ]


def update(parts: list[Tensor], grad: Tensor, step: int) -> None:
    weight, exp_avg, exp_avg_sq, low = parts
    adamw_(weight, grad, exp_avg, exp_avg_sq, hyper(step), low=low, **SETTINGS)


def torch_steps(length: int, grads: list[Tensor]) -> Tensor:
    parameter = draw(length).double().requires_grad_()
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for grad in grads:
        parameter.grad = 0.5 * grad.double()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 1000, 2048])
def test_five_steps_follow_torch(length: int, dtype: torch.dtype) -> None:
    grads = [draw(length, dtype=dtype, seed=step) for step in range(1, 6)]
    parts = state(length)
    for step, grad in enumerate(grads, 1):
        update(parts, grad, step)
    assert_near(parts[0], torch_steps(length, grads))
    assert torch.equal(parts[3], parts[0].bfloat16())


def test_bfloat16_moments_stay_close() -> None:
    grads = [draw(1500, seed=step) for step in range(1, 6)]
    parts = state(1500, torch.bfloat16)
    for step, grad in enumerate(grads, 1):
        update(parts, grad, step)
    # five steps of 1e-2 with moments that keep eight bits move weights of size 1 by some 3e-5
    error = (parts[0] - torch_steps(1500, grads)).norm() / parts[0].norm()
    assert 1e-6 < error < 1e-4


def test_shards_give_the_bits_of_the_whole_and_touch_nothing_else() -> None:
    whole, shards = state(1800), state(1800)
    padded = [torch.full((1900,), torch.nan, dtype=x.dtype) for x in shards]
    for pad, x in zip(padded, shards, strict=True):
        pad[50:1850] = x
    for step in range(1, 4):
        grad = draw(1800, seed=step)
        update(whole, grad, step)
        for span in (slice(0, 700), slice(700, 1800)):
            inner = [x[50:1850][span] for x in padded]
            update(inner, grad[span], step)
    for a, b in zip(whole, padded, strict=True):
        assert torch.equal(a, b[50:1850])
        assert_guards_untouched(b[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0, 1, 4095, 20000])
def test_sum_of_squares(length: int, dtype: torch.dtype) -> None:
    x = draw(length, dtype=dtype)
    want = x.double().square().sum()
    out = torch.tensor([2.0])
    assert_near(sum_squares(x, out.clone(), programs=3)[0], want)
    total = sum_squares(x, out, accumulate=True, programs=2)[0]
    assert_near(total, want + 2, torch.float32)


def test_sum_of_squares_shows_what_is_not_finite() -> None:
    x = draw(5000)
    x[4999] = torch.inf
    assert sum_squares(x, torch.empty(1)).isinf()
    x[4000] = torch.nan
    assert sum_squares(x, torch.empty(1)).isnan()


CAST_TYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]


@pytest.mark.parametrize("dtype", CAST_TYPES)
def test_scaled_casts_saturate_and_keep_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.cat([100 * draw(3000), torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38])])
    got = scale_cast(x, torch.tensor([1.5]), dtype)
    want = (x * 1.5).clamp(-largest, largest).to(dtype)
    assert torch.equal(got[:3000].float(), want[:3000].float())
    assert got[3000].float().isnan()
    assert got[3001:].float().tolist() == [largest, -largest, largest]
    with pytest.raises(ValueError, match="not one float32"):
        scale_cast(x, torch.ones(2), dtype)


def test_bits_and_errors() -> None:
    grad = draw(1500, seed=9)

    def run() -> list[Tensor | None]:
        parts = state(1500)
        update(parts, grad, 1)
        return [*parts, sum_squares(grad, torch.empty(1), programs=3)]

    assert_same_bits(run)
    parts = state(8)
    with pytest.raises(TypeError, match=r"weight is torch\.bfloat16"):
        update([parts[0].bfloat16(), *parts[1:]], draw(8), 1)
    with pytest.raises(ValueError, match=r"grad has shape \(7,\), expected \(8,\)"):
        update(parts, draw(7), 1)
    with pytest.raises(ValueError, match="types of the moments must be the same"):
        update([parts[0], parts[1].bfloat16(), *parts[2:]], draw(8), 1)
