"""LayerNorm, GELU, biases, norms of heads and scaled rotation against formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megalite import kernels
from megalite.kernels.plain import blocks as reference_blocks
from tests.kernels.kit import DTYPES, STRIDES, assert_matches, draw, exact, with_strides

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("shape", [(1, 3), (7, 5), (13, 96)])
def test_layer_norm(shape, strides, dtype) -> None:
    x = with_strides(draw(*shape, dtype=dtype) + 2, strides)
    dy = with_strides(draw(*shape, dtype=dtype, seed=2), strides)
    weight, bias = (draw(shape[1], dtype=dtype, seed=seed) for seed in (1, 3))
    x64, weight64, bias64 = exact(x), exact(weight), exact(bias)
    centred = x64 - x64.mean(1, keepdim=True)
    y64 = centred / torch.sqrt(centred.square().mean(1, keepdim=True) + 1e-3) * weight64 + bias64
    y64.backward(dy.double())
    before = x.clone(), dy.clone()

    y, mean, rstd = kernels.layer_norm(x, weight, bias, 1e-3)
    dx, *dparams = kernels.layer_norm_grad(dy, x, weight, mean, rstd)

    assert y.dtype == dx.dtype == dtype
    assert mean.dtype == rstd.dtype == dparams[0].dtype == dparams[1].dtype
    assert mean.shape == rstd.shape == (shape[0], 1)
    assert rstd.dtype in (torch.float32, torch.float64)
    assert_matches_or_half(y, y64)
    assert_matches_or_half(dx, x64.grad)
    assert_matches(dparams[0], weight64.grad)
    assert_matches(dparams[1], bias64.grad)
    assert torch.equal(x, before[0])
    assert torch.equal(dy, before[1])


def assert_matches_or_half(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    """`assert_matches`, and for float16 that the result was rounded only once."""
    assert got is not None
    assert want is not None
    if got.dtype != torch.float16:
        assert_matches(got, want)
        return
    unit = torch.exp2(want.detach().abs().clamp_min(2.0**-14).log2().floor() - 11)
    assert ((got.double() - want).abs() <= unit + 1e-6 * want.abs().max()).all()


def test_layer_norm_of_a_row_far_from_zero_keeps_its_digits() -> None:
    x = (draw(3, 64) + 1000.0).float()
    y, *_ = kernels.layer_norm(x, torch.ones(64), torch.zeros(64), 1e-5)
    centred = x.double() - x.double().mean(1, keepdim=True)
    want = centred / torch.sqrt(centred.square().mean(1, keepdim=True) + 1e-5)
    assert (y - want).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", STRIDES)
def test_gelu(strides, dtype) -> None:
    h = with_strides(4 * draw(7, 34, dtype=dtype), strides)
    da = with_strides(draw(7, 34, dtype=dtype, seed=1), strides)
    h64 = exact(h)
    inner = math.sqrt(2 / math.pi) * (h64 + 0.044715 * h64**3)
    a64 = h64 / 2 * (1 + torch.tanh(inner))
    a64.backward(da.double())
    before = h.clone(), da.clone()

    a = kernels.gelu(h)
    assert torch.equal(h, before[0])
    dh, again, dbias = kernels.gelu_grad(da, h, recompute=True)

    assert dh is h, "the gradient of an operation takes the place of what was saved for it"
    assert a.dtype == dtype
    assert_matches(a, a64)
    assert_matches(dh, h64.grad)
    assert again is not None
    assert torch.equal(again, a)
    assert torch.equal(da, before[1])
    assert dbias is None


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("erf", [False, True])
def test_gelu_with_a_bias_in_blocks(erf, strides, dtype, small_blocks) -> None:
    h = with_strides(4 * draw(7, 34, dtype=dtype), strides)
    da = with_strides(draw(7, 34, dtype=dtype, seed=1), strides)
    bias = draw(34, dtype=dtype, seed=2)
    h64, bias64 = exact(h), exact(bias)
    a64 = F.gelu(h64 + bias64, approximate="none" if erf else "tanh")
    a64.backward(da.double())
    a = kernels.gelu(h, bias, erf=erf)
    dh, _, dbias = kernels.gelu_grad(da, h, False, bias, erf=erf)

    assert a.dtype == dtype
    for got, want in ((a, a64), (dh, h64.grad), (dbias, bias64.grad)):
        assert_matches_or_half(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_give_the_bits_of_the_whole(dtype, request) -> None:
    h, da, x = draw(7, 32, dtype=dtype), draw(7, 16, dtype=dtype), draw(7, 32, dtype=dtype)

    def results() -> list[torch.Tensor]:
        activated = kernels.swiglu(h), kernels.gelu(x)
        gradients = kernels.swiglu_grad(da, h.clone()), kernels.gelu_grad(x, x.clone())
        return [*activated, *(found[0] for found in gradients)]

    whole = results()
    request.getfixturevalue("small_blocks")
    for one, other in zip(results(), whole, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Blocks of 96 elements, so that the last one is shorter."""
    monkeypatch.setattr(reference_blocks, "_BLOCK_ELEMENTS", 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_norm_weights_over_many_tokens(dtype) -> None:
    """torch's own, summed in one chain, is off by 3e-6 here, and by 0.2 in bfloat16."""
    x, dy = draw(40_000, 8, dtype=dtype), draw(40_000, 8, dtype=dtype, seed=1)
    weight, bias = draw(8, dtype=dtype, seed=2), draw(8, dtype=dtype, seed=3)
    x64, weight64, bias64 = (exact(t) for t in (x, weight, bias))
    F.layer_norm(x64, (8,), weight64, bias64, 1e-5).backward(dy.double())

    _, mean, rstd = kernels.layer_norm(x, weight, bias, 1e-5)
    dx, dweight, dbias = kernels.layer_norm_grad(dy, x, weight, mean, rstd)

    for got, want in ((dx, x64.grad), (dweight, weight64.grad), (dbias, bias64.grad)):
        assert_matches(got, want)


def test_slope_of_gelu_near_one_keeps_its_digits() -> None:
    """torch's own, which takes 1 - tanh^2, is off by 1e-6."""
    z = torch.linspace(-12, 12, 10_001)[:, None]
    z64 = exact(z)
    F.gelu(z64, approximate="tanh").sum().backward()
    dz, _, _ = kernels.gelu_grad(torch.ones_like(z), z)
    assert z64.grad is not None
    assert (dz.double() - z64.grad).abs().max() < 4e-7
    far = torch.tensor([[-torch.inf, -3e38, -1e13, -100.0, 100.0, 1e13, 3e38, torch.inf]])
    want = (far > 0).float()
    assert (kernels.gelu_grad(torch.ones_like(far), far)[0] - want).abs().max() < 1e-30


def test_gelu_of_large_inputs_stays_finite() -> None:
    h = torch.tensor([[-1e4, 1e4, 0.0]])
    assert kernels.gelu(h).tolist() == [[0.0, 1e4, 0.0]]
    slopes = kernels.gelu_grad(torch.ones(1, 3), h)[0][0].tolist()
    assert slopes == pytest.approx([0.0, 1.0, 0.5], rel=0, abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_added_before_the_only_rounding(dtype) -> None:
    x, weight, bias = draw(9, 6, dtype=dtype), draw(4, 6, dtype=dtype), draw(4, dtype=dtype)
    want = x.double() @ weight.double().t() + bias.double()
    assert_matches(kernels.linear(x, weight, bias), want)
    dy = draw(300, 4, dtype=dtype, seed=3)
    grad = kernels.bias_grad(dy)
    assert grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_matches(grad, dy.double().sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True])
def test_weights_around_zero_have_one_added_before_they_are_rounded(centred, dtype) -> None:
    ops = kernels.Kernels()
    x, dy = draw(5, 8, dtype=dtype), draw(5, 8, dtype=dtype, seed=2)
    weight = draw(8, dtype=dtype, seed=1) / 1000  # next to 1, bfloat16 would lose it
    bias = draw(8, dtype=dtype, seed=3) if centred else None
    y, s, mean, rstd = ops.norm(x, weight, bias, 1e-3, offset=1.0)
    dx, *sums = ops.norm_grad(dy, s, weight, mean, rstd, offset=1.0)
    wide = (weight.double() + 1).to(rstd.dtype)
    want_y, _, want_mean, want_rstd = ops.norm(x, wide, bias, 1e-3)
    want_dx, *want_sums = ops.norm_grad(dy, x, wide, want_mean, want_rstd)
    for got, want in ((y, want_y), (dx, want_dx), *zip(sums, want_sums, strict=True)):
        assert (got is None) == (want is None)
        assert got is None or want is None or torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_a_weight_for_each_head(dtype) -> None:
    x, weight = draw(5, 2, 3, 8, dtype=dtype), draw(3, 8, dtype=dtype, seed=1)
    dy = draw(5, 2, 3, 8, dtype=dtype, seed=2)
    x64, weight64 = exact(x), exact(weight)
    y64 = x64 / torch.sqrt(x64.square().mean(-1, keepdim=True) + 1e-3) * weight64
    y64.backward(dy.double())
    y, rstd = kernels.rms_norm(x, weight, 1e-3)
    dx, dweight = kernels.rms_norm_grad(dy, x, weight, rstd)
    assert_matches(y, y64)
    assert_matches(dx, x64.grad)
    assert_matches(dweight.sum(0), weight64.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [0, 2, 6])
def test_rotation_of_a_part_of_each_head_copies_the_rest(rotary, dtype) -> None:
    qkv = draw(8, 2, 4, 6, dtype=dtype)
    tables = kernels.rope_tables(4, rotary, 50.0, dtype, CPU)
    assert tables[0].shape == (4, rotary // 2)
    q, k, v = kernels.rotate(qkv, *tables)
    for got, want in ((q, qkv[:, :, :2]), (k, qkv[:, :, 2:3]), (v, qkv[:, :, 3:])):
        assert torch.equal(got[..., rotary:], want[..., rotary:])
    alone = [part.contiguous() for part in (q, k)]
    if rotary:
        part = kernels.rotate(qkv[..., :rotary].contiguous(), *tables)
        for got, want in zip(alone, part, strict=False):
            assert torch.equal(got[..., :rotary], want)
    back = torch.full_like(qkv, torch.nan)
    kernels.rotate_grad_(back, q, k, v, *tables)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (back - qkv).abs().max() < tolerance


def angles(scaling: kernels.RopeScaling | None, rotary: int = 64, theta: float = 1e4) -> list:
    cos, sin = kernels.rope_tables(2, rotary, theta, torch.float64, CPU, scaling)
    gain = 1.0 if scaling is None else scaling.gain
    assert ((cos.square() + sin.square()).sqrt() - gain).abs().max() < 1e-12
    return torch.atan2(sin[1], cos[1]).tolist()


def test_linear_scaling_slows_every_pair() -> None:
    scaled = angles(kernels.LinearScaling(4.0))
    assert scaled == pytest.approx([angle / 4 for angle in angles(None)], rel=1e-12)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_between_two_numbers_of_turns(truncate: bool) -> None:
    """By its definition: pair i turns L / wave_i times in L tokens; 32 and 1 turns are its ends."""
    length, factor = 4096, 8.0
    plain = angles(None)
    scaled = angles(kernels.YarnScaling(factor, length, truncate=truncate))
    turns = [length * angle / (2 * math.pi) for angle in plain]
    # the number of turns falls by the same factor from pair to pair
    fall = math.log(turns[0] / turns[1])
    first, last = (math.log(turns[0] / end) / fall for end in (32.0, 1.0))
    first, last = (math.floor(first), math.ceil(last)) if truncate else (first, last)
    for pair, (old, new) in enumerate(zip(plain, scaled, strict=True)):
        slowed = min(1.0, max(0.0, (pair - first) / (last - first)))
        assert new == pytest.approx(old * (1 - slowed + slowed / factor), rel=1e-9)
    assert scaled[0] == pytest.approx(plain[0])
    assert scaled[-1] == pytest.approx(plain[-1] / factor)


def test_yarn_multiplies_by_its_attention_factor() -> None:
    assert kernels.YarnScaling(8.0, 64).gain == pytest.approx(0.1 * math.log(8) + 1)
    assert kernels.YarnScaling(1.0, 64).gain == 1.0
    given = kernels.YarnScaling(8.0, 64, attention_factor=1.3)
    assert given.gain == 1.3
    angles(given)
    # a ramp between ends that are one and the same pair
    assert len(angles(kernels.YarnScaling(8.0, 6), 4)) == 2


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() -> None:
    """Against its definition by wave lengths: factor 8, low 1, high 4, 8192 tokens (Llama 3.1)."""
    scaling = kernels.Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain = kernels.rope_tables(2, 128, 5e5, torch.float64, CPU)
    scaled = kernels.rope_tables(2, 128, 5e5, torch.float64, CPU, scaling)
    angle, slowed = (torch.atan2(sin[1], cos[1]) for cos, sin in (plain, scaled))
    wave = 2 * math.pi / angle
    for length, old, new in zip(wave.tolist(), angle.tolist(), slowed.tolist(), strict=True):
        if length < 8192 / 4:
            want = old
        elif length > 8192:
            want = old / 8
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            want = (1 - smooth) * old / 8 + smooth * old
        assert new == pytest.approx(want, rel=1e-9)
    assert 0 < ((wave > 2048) & (wave < 8192)).sum() < 64
