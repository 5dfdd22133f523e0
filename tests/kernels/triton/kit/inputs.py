"""Inputs, bounds and bit comparisons for the tests of interpreted kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.kernels.triton.kit.shim import overflow_checks, reversed_programs
from tests.tolerances import KERNEL_BACKWARD, KERNEL_FORWARD

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values that depend on shape and seed only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def rows_of_wider(x: Tensor, extra: int = 3) -> Tensor:
    """The same values as the leading columns of a wider NaN-filled tensor."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + extra), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def far_rows(x: Tensor) -> Tensor:
    """x's values in rows 2^30 elements apart; the memory between them is reserved, not touched."""
    stride = 1 << 30
    storage = torch.UntypedStorage(x.element_size() * ((len(x) - 1) * stride + x.shape[1]))
    far = torch.empty(0, dtype=x.dtype).set_(storage, 0, tuple(x.shape), (stride, 1))
    return far.copy_(x)


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """(whole, view): x's values as the middle rows of a NaN-filled tensor."""
    whole = x.new_full((x.shape[0] + 4, *x.shape[1:]), torch.nan)
    whole[2:-2] = x
    return whole, whole[2:-2]


def assert_guards_untouched(whole: Tensor) -> None:
    assert whole[:2].isnan().all()
    assert whole[-2:].isnan().all()


def exact(x: Tensor) -> Tensor:
    """A float64 leaf of the same values."""
    return x.detach().double().requires_grad_()


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN anywhere gives NaN."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, (got.shape, want.shape)
    scale = float(want.norm()) or 1.0
    return float((got - want).norm()) / scale


def assert_near(
    got: Tensor | None,
    want: Tensor | None,
    dtype: torch.dtype | None = None,
    backward: bool = False,
) -> None:
    """`got` is within the kernel bound of `dtype` (default: its own) of the float64 `want`.

    A gradient that is missing (None) fails.
    """
    assert got is not None
    assert want is not None
    bounds = KERNEL_BACKWARD if backward else KERNEL_FORWARD
    found = error(got, want)
    assert found <= bounds[dtype or got.dtype], found


def assert_same_bits(run: Callable[[], Sequence[Tensor | None]], overflow: bool = True) -> None:
    """A second run, one with the programs in reverse, and one with overflow checks agree."""
    first = run()
    for mode in (_plainly, reversed_programs, *([overflow_checks] if overflow else [])):
        with mode():
            for a, b in zip(first, run(), strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@contextmanager
def _plainly() -> Iterator[None]:
    yield
