"""The repaired interpreter and the memory checker: each planted fault is caught."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from megalite.kernels.errors import BackendError
from megalite.kernels.triton import interpreter_repairs
from tests.kernels.triton.kit import shim
from tests.kernels.triton.kit.memory_check import Checker


@triton.jit
def _bfloat16_kernel(x_ptr, y_ptr, out_ptr, product_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.maximum(x * y + x, -x))
    rows = tl.load(x_ptr + i[:, None] * N + i[None, :])
    tl.store(product_ptr + i[:, None] * N + i[None, :], tl.dot(rows, rows))


def test_bfloat16_arithmetic_and_products_are_those_of_torch() -> None:
    x = torch.randn(16, 16).bfloat16()
    y = torch.randn(16).bfloat16()
    out, product = torch.empty(16).bfloat16(), torch.empty(16, 16)
    _bfloat16_kernel[(1,)](x, y, out, product, N=16)
    assert torch.equal(out, torch.maximum(x[0] * y + x[0], -x[0]))
    torch.testing.assert_close(product, x.float() @ x.float(), rtol=1e-6, atol=1e-6)


@triton.jit
def _unary_kernel(x_ptr, root_ptr, inverse_ptr, erf_ptr, fma_ptr, clamp_ptr, cast_ptr):
    i = tl.arange(0, 4)
    x = tl.load(x_ptr + i)
    tl.store(root_ptr + i, tl.sqrt(x.to(tl.float32)).to(tl.bfloat16))
    tl.store(inverse_ptr + i, tl.rsqrt(x.to(tl.float32)).to(tl.bfloat16))
    tl.store(erf_ptr + i, tl.erf(x.to(tl.float32)).to(tl.bfloat16))
    tl.store(fma_ptr + i, tl.fma(x, x, x))
    tl.store(clamp_ptr + i, tl.where(x > 1.0, x, -x))
    tl.store(cast_ptr + i, x.to(tl.float8e4nv))


def test_bfloat16_functions_and_casts_are_those_of_torch() -> None:
    x = torch.tensor([0.3, 1.0, 2.3, 451.0]).bfloat16()
    root, inverse, erf, fma, clamp = (torch.empty(4).bfloat16() for _ in range(5))
    cast = torch.empty(4).to(torch.float8_e4m3fn)
    _unary_kernel[(1,)](x, root, inverse, erf, fma, clamp, cast)
    wide = x.float()
    assert torch.equal(root, wide.sqrt().bfloat16())
    assert torch.equal(inverse, wide.rsqrt().bfloat16())
    assert torch.equal(erf, wide.erf().bfloat16())
    assert torch.equal(fma, (wide * wide + wide).bfloat16())
    assert torch.equal(clamp, torch.where(x > 1, x, -x))
    assert torch.equal(cast.float(), x.to(torch.float8_e4m3fn).float())


def test_an_interpreter_that_is_still_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_repairs, "narrow", lambda values: values.astype("uint16"))
    with pytest.raises(BackendError, match=r"does not compute in bfloat16 as those of 3\.6 to"):
        interpreter_repairs._check()


@triton.jit
def _sum_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


def test_sums_of_raw_bfloat16_are_refused() -> None:
    with pytest.raises(InterpreterError, match="convert it to float32"):
        _sum_kernel[(1,)](torch.ones(8).bfloat16(), torch.empty(1), N=8)


@triton.jit
def _copy_kernel(x_ptr, out_ptr, shift, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + shift, mask=i < n, other=0.0)
    tl.store(out_ptr + i, x, mask=i < n)


def test_out_of_bounds_is_caught(checker: Checker) -> None:
    whole = torch.arange(24.0)
    out = torch.empty(12)
    before = checker.launches
    _copy_kernel[(3,)](whole[4:16], out, 0, 12, BLOCK=4)
    assert torch.equal(out, whole[4:16])
    assert checker.launches == before + 1
    with pytest.raises(InterpreterError, match=r"out of bounds: load of 2 of 4 lanes in .*\(2, 0"):
        _copy_kernel[(3,)](whole[4:16], out, 2, 12, BLOCK=4)
    with pytest.raises(InterpreterError, match="out of bounds: store of 4 of 4 lanes"):
        _copy_kernel[(4,)](whole, out, 0, 16, BLOCK=4)


def test_gaps_between_rows_are_out_of_bounds() -> None:
    rows = torch.zeros(4, 8)[:, :6]
    _copy_kernel[(1,)](rows, torch.empty(4), 0, 4, BLOCK=4)
    with pytest.raises(InterpreterError, match="out of bounds: load of 2 of 4 lanes"):
        _copy_kernel[(2,)](rows, torch.empty(8), 0, 8, BLOCK=4)


@triton.jit
def _overlap_kernel(out_ptr, STEP: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, 4)
    tl.store(out_ptr + i, i.to(tl.float32))


def test_two_programs_writing_one_element_are_caught() -> None:
    _overlap_kernel[(2,)](torch.empty(8), STEP=4)
    for order in (False, True):
        with pytest.raises(InterpreterError, match="writes what another program wrote"):
            _overlap_in_order(order)


def _overlap_in_order(reverse: bool) -> None:
    if reverse:
        with shim.reversed_programs():
            _overlap_kernel[(2,)](torch.empty(8), STEP=3)
    else:
        _overlap_kernel[(2,)](torch.empty(8), STEP=3)


@triton.jit
def _chain_kernel(x_ptr):
    program = tl.program_id(0)
    before = tl.load(x_ptr + program)
    tl.store(x_ptr + program + 1, before + 1)


def test_reading_what_another_program_wrote_is_caught() -> None:
    x = torch.zeros(4)
    with pytest.raises(InterpreterError, match="reads what another program"):
        _chain_kernel[(3,)](x)
    with shim.reversed_programs(), pytest.raises(InterpreterError, match="another program read"):
        _chain_kernel[(3,)](x)


@triton.jit
def _twice_kernel(out_ptr):
    i = tl.arange(0, 4)
    tl.store(out_ptr + i // 2, i.to(tl.float32))


def test_lanes_of_one_store_that_disagree_are_caught() -> None:
    with pytest.raises(InterpreterError, match="writes an element twice"):
        _twice_kernel[(1,)](torch.empty(2))


@triton.jit
def _no_other_kernel(x_ptr, out_ptr, n):
    i = tl.arange(0, 4)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n))


def test_masked_lanes_without_other_hold_nan() -> None:
    out = torch.empty(4)
    _no_other_kernel[(1,)](torch.ones(2), out, 2)
    assert out[:2].tolist() == [1, 1]
    assert out[2:].isnan().all()


@triton.jit
def _overflow_kernel(out_ptr, stride):
    tl.store(out_ptr, (tl.program_id(0) + 70000) * stride)


def test_int32_overflow_is_caught_on_demand() -> None:
    out = torch.empty(1, dtype=torch.int64)
    _overflow_kernel[(1,)](out, 70000)
    with shim.overflow_checks(), pytest.raises(InterpreterError, match="overflow"):
        _overflow_kernel[(1,)](out, 70000)


@triton.jit
def _loop_kernel(out_ptr, n_ptr):
    total = 0
    for i in range(0, tl.load(n_ptr)):
        total += i
    tl.store(out_ptr, total)


def test_loop_bounds_may_come_from_memory() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    _loop_kernel[(1,)](out, torch.tensor([5], dtype=torch.int32))
    assert out.item() == 10
