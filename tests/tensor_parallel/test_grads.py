"""The gradient store: where contributions go, when, and who hears of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megalite.distributed.precision import main_grad_dtype
from megalite.tensor_parallel.grads import GradStore


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "main"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_buffer_is_zeros_of_the_main_dtype(dtype, main) -> None:
    store, param = GradStore(), parameter(dtype)
    assert main_grad_dtype(dtype) == store.buffer(param).dtype == main
    assert store.buffer(param).shape == param.shape
    assert not store.buffer(param).any()
    assert store.buffer(param) is store.buffer(param)


def test_contributions_add_up_in_the_bound_buffer() -> None:
    store, param = GradStore(), parameter()
    flat = torch.zeros(10)
    store.bind(param, flat[2:8].view(2, 3))
    for _ in range(2):
        store.add(param, lambda buffer: buffer.add_(1.5))
    assert flat.tolist() == [0.0, 0.0, *[3.0] * 6, 0.0, 0.0]
    assert param.grad is None


def test_bind_refuses_a_buffer_that_contributions_would_miss() -> None:
    store, param = GradStore(), parameter()
    with pytest.raises(AssertionError):
        store.bind(param, torch.zeros(3, 2))
    with pytest.raises(AssertionError):
        store.bind(param, torch.zeros(3, 2).t())  # flattening it would make a copy


def test_deferred_contributions_run_when_called_and_are_heard_then() -> None:
    store, param = GradStore(), parameter()
    heard: list[float] = []
    store.listener = lambda p: heard.append(float(store.buffer(p)[0, 0]))
    store.deferred = []
    store.add(param, lambda buffer: buffer.add_(1.0), deferrable=True)
    store.add(param, lambda buffer: buffer.add_(10.0))
    assert heard == [10.0]
    (queued,) = store.deferred
    store.deferred = None  # the next backward may be another kind of action
    queued()
    assert heard == [10.0, 11.0]
    store.add(param, lambda buffer: buffer.add_(100.0), deferrable=True)
    assert heard == [10.0, 11.0, 111.0]


def test_frozen_parameter_is_left_alone() -> None:
    store, param = GradStore(), parameter()
    param.requires_grad_(False)
    heard: list[nn.Parameter] = []
    store.listener = heard.append
    store.deferred = []
    for deferrable in (True, False):
        store.add(param, lambda buffer: buffer.add_(1.0), deferrable=deferrable)
    assert heard == store.deferred == []
    assert not store.buffer(param).any()
