"""The sets of operations: the same fields, called alike, whoever computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from megalite.kernels import Kernels
from megalite.kernels.errors import BackendError
from megalite.kernels.others.apex import ApexNorm
from megalite.kernels.plain import products
from megalite.kernels.triton.operations import TRITON

PLAIN = Kernels()
OPERATIONS = [field.name for field in fields(Kernels) if callable(getattr(PLAIN, field.name))]
PRODUCTS = ("linear", "linear_input_grad", "accumulate_weight_grad_", "bias_grad")


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Names, kinds and defaults of a function's parameters, in order."""
    found = inspect.signature(function).parameters.values()
    return {x.name: (x.kind, x.default) for x in found}


def others() -> Iterator[tuple[str, Callable[..., Any]]]:
    yield from ((name, getattr(TRITON, name)) for name in OPERATIONS)
    norm = ApexNorm(PLAIN, None)
    yield from (("norm", norm.norm), ("norm_grad", norm.norm_grad))


@pytest.mark.parametrize(("name", "function"), list(others()))
def test_every_set_takes_the_arguments_of_plain_torch(
    name: str, function: Callable[..., Any]
) -> None:
    """A layer calls a field without knowing whose it is; more arguments are for tests alone."""
    plain, given = parameters(getattr(PLAIN, name)), parameters(function)
    assert {key: given.get(key) for key in plain} == plain
    assert [key for key in given if key in plain] == list(plain)
    more = [value for key, value in given.items() if key not in plain]
    assert all(default is not inspect.Parameter.empty for _, default in more)


def test_dense_products_alone_are_torchs() -> None:
    torchs = {name: getattr(products, name) for name in PRODUCTS}
    assert {name: getattr(TRITON, name) for name in PRODUCTS} == torchs
    same = {name for name in OPERATIONS if getattr(TRITON, name) is getattr(PLAIN, name)}
    assert same <= set(PRODUCTS)


def test_a_set_is_not_changed_in_place() -> None:
    with pytest.raises(FrozenInstanceError):
        PLAIN.linear = PLAIN.bias_grad  # type: ignore[misc]


def test_plain_torch_takes_every_width_and_triton_those_of_its_kernels() -> None:
    assert TRITON.max_columns is not None
    PLAIN.check_model(head_dim=7, hidden_size=TRITON.max_columns + 1)
    TRITON.check_model(head_dim=128, hidden_size=TRITON.max_columns)
    with pytest.raises(BackendError, match="the triton norms take up to"):
        TRITON.check_model(head_dim=128, hidden_size=TRITON.max_columns + 1)
