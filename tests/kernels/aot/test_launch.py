"""Prepared launches start the kernel that Triton's own dispatch chooses, and only unwatched."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import megalite.kernels.triton as kernels
from megalite.kernels.triton import launch
from megalite.kernels.triton.attention_tiles import operand
from megalite.kernels.triton.launch import Prepared, prepared
from tests.kernels.aot.kit import AbsentGpu


@triton.jit(do_not_specialize=["key"])
def _copy(x_ptr, y_ptr, rows, stride, key, scale, WIDTH: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0) * stride + tl.arange(0, WIDTH)
    tl.store(y_ptr + row, tl.load(x_ptr + row, mask=row < rows) * scale + key)


class _Compiled(CompiledKernel):  # type: ignore[misc]
    """Takes the place of a compiled kernel: keeps what it was specialised for and its starts."""

    module, function, packed_metadata, metadata = None, "handle", "packed", None

    def __init__(self, chosen: object) -> None:
        self.chosen, self.dispatched = chosen, 0
        self.starts: list[tuple[Any, ...]] = []

    def launch_metadata(self, *_: Any) -> str:
        self.dispatched += 1  # only Triton's dispatch asks for it
        return "metadata"

    def run(self, *arguments: Any) -> None:
        self.starts.append(arguments)


class _Gpu(AbsentGpu):
    """Two GPUs of one kind, of which `device` is the current one."""

    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Gpu]:
    def compiled(jit: Any, key: str, signature: Any, device: int, *rest: Any, **_: Any) -> Any:
        constexprs, _, attrs = rest[:3]
        kernel = _Compiled((device, signature, constexprs, attrs))
        jit.device_caches[device][0][key] = kernel
        return kernel

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    before = driver._active
    absent = _Gpu(90)
    driver.set_active(absent)
    yield absent
    driver._active = before


def new_kernel() -> Any:
    """A kernel without compiled code, prepared."""
    made = triton.jit(_copy.fn, do_not_specialize=["key"])
    return prepared(made)


def started(kernel: Prepared) -> list[_Compiled]:
    """The compiled kernels that Triton keeps for a kernel."""
    caches = kernel.jit.device_caches.values()
    return [found for cache, *_ in caches for found in cache.values()]


INTEGERS = (
    0, 1, 2, 15, 16, 17, 4096, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1,
    -(2**31) - 16, 2**63 - 1, 2**63 - 16, 2**63, 2**64 - 1,
)  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64,
          torch.uint8, torch.bool)  # fmt: skip


def tensors() -> list[Any]:
    """Pointers of all types and alignments, None, and descriptors."""
    plain = [torch.zeros(512, dtype=dtype) for dtype in DTYPES]
    shifted = [x[n:] for x in plain[:3] for n in (1, 2, 4, 8, 16)]
    square = torch.zeros(64, 64)
    squares = (square, square.bfloat16(), square[:32], square[1:])
    described = [
        TensorDescriptor.from_tensor(x, block)
        for x in squares
        for block in ([16, 32], [32, 16], [16, 64])
    ]
    return [*plain, *shifted, nn.Parameter(plain[0]), None, *described]


def forms() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that differ in one place from the first ones, and many that differ in more."""
    found = tensors()
    first = (found[0], found[0], 48, 64, 5, 1.0)
    choices = (found, found, INTEGERS, INTEGERS, INTEGERS, (1.0, 0.5))
    constants = [
        {"WIDTH": width, "ADD": add, "num_warps": warps, **rest}
        for width in (16, 32)
        for add in (True, False)
        for warps in (4, 8)
        for rest in ({}, {"num_stages": 3})
    ]
    made = [(first, options) for options in constants]
    for place, values in enumerate(choices):
        made += [((*first[:place], x, *first[place + 1 :]), constants[0]) for x in values]
    draw = random.Random(0)
    for _ in range(1500):
        made.append((tuple(draw.choice(x) for x in choices), draw.choice(constants)))
    return made


def test_every_form_starts_the_kernel_that_triton_chooses(gpu: _Gpu) -> None:
    kernel = new_kernel()
    calls = [(device, *form) for form in forms() for device in (0, 1)]
    random.Random(1).shuffle(calls)
    for device, arguments, options in itertools.chain(calls, calls):
        gpu.device = device
        kernel[(3, 2)](*arguments, **options)
        ours = [(x, x.starts.pop()) for x in started(kernel) if x.starts]
        kernel.jit[(3, 2)](*arguments, **options)
        theirs = [(x, x.starts.pop()) for x in started(kernel) if x.starts]
        # one start each, of the same compiled kernel, with the same arguments
        assert [x for x, _ in ours] == [x for x, _ in theirs]
        (_, mine), (_, chosen) = ours[0], theirs[0]
        assert mine[:6] == chosen[:6] == (3, 2, 1, 100 + device, "handle", "packed")
        assert all(x is y for x, y in zip(mine[9:], chosen[9:], strict=True))
        assert len(chosen[9:]) == 8

    # the second time none of them went through the dispatch
    before = sum(x.dispatched for x in started(kernel))
    for device, arguments, options in calls:
        gpu.device = device
        kernel[(3,)](*arguments, **options)
    assert sum(x.dispatched for x in started(kernel)) == before


def usual() -> tuple[Any, ...]:
    x = torch.zeros(512)
    return x, x, 48, 64, 5, 1.0


def dispatched(kernel: Prepared, *arguments: Any, **options: Any) -> bool:
    """Whether a launch, made after one of the same form, goes through Triton's dispatch."""
    kernel[(1,)](*arguments, **options)
    before = sum(x.dispatched for x in started(kernel))
    kernel[(1,)](*arguments, **options)
    return sum(x.dispatched for x in started(kernel)) == before + 1


OPTIONS: dict[str, Any] = {"WIDTH": 16, "ADD": True}


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_a_launch_are_called(
    gpu: _Gpu, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = new_kernel()
    assert not dispatched(kernel, *usual(), **OPTIONS)

    def hook(*_: Any) -> None: ...

    chain = getattr(knobs.runtime, name)
    chain.add(hook)
    try:
        assert dispatched(kernel, *usual(), **OPTIONS)
        (found,) = started(kernel)
        assert found.starts[-1][6:9] == (
            "metadata", knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        )  # fmt: skip
    finally:
        chain.remove(hook)
    assert not dispatched(kernel, *usual(), **OPTIONS)
    monkeypatch.setattr(knobs.runtime, name, hook)  # a function in place of the chain
    assert dispatched(kernel, *usual(), **OPTIONS)


def test_hooks_of_a_kernel_and_another_run_are_called(
    gpu: _Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, seen = new_kernel(), []
    assert not dispatched(kernel, *usual(), **OPTIONS)
    kernel.jit.add_pre_run_hook(lambda *_, **__: seen.append("hook"))
    kernel[(1,)](*usual(), **OPTIONS)
    assert seen == ["hook"]
    kernel.jit.pre_run_hooks.clear()
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: seen.append("run"))
    kernel[(1,)](*usual(), **OPTIONS)
    assert seen == ["hook", "run"]


def test_a_hook_of_the_compiler_takes_part(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = new_kernel()
    assert not dispatched(kernel, *usual(), **OPTIONS)
    hook = lambda *_: ("key", "hash")  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", hook)
    assert dispatched(kernel, *usual(), **OPTIONS)


class _Subclass(Tensor):
    """A tensor of another type, as fake tensors are."""


@pytest.mark.parametrize(
    ("place", "value"),
    [(2, True), (5, True), (2, (3, 4)), (0, torch.zeros(512).as_subclass(_Subclass))],
    ids=["int", "float", "tuple", "tensor"],
)
def test_an_argument_of_another_type_is_left_to_triton(
    gpu: _Gpu, place: int, value: object
) -> None:
    kernel, arguments = new_kernel(), list(usual())
    arguments[place] = value
    assert dispatched(kernel, *arguments, **OPTIONS)
    assert not kernel._launches


def test_constexprs_by_position_are_left_to_triton(gpu: _Gpu) -> None:
    """Their values choose the kernel, and a form has only what is needed of an integer."""
    kernel = new_kernel()
    for width in (32, 64):
        assert dispatched(kernel, *usual(), width, ADD=True)
    assert len(started(kernel)) == 2


def test_arguments_by_keyword_are_left_to_triton(gpu: _Gpu) -> None:
    assert dispatched(new_kernel(), *usual()[:5], scale=1.0, **OPTIONS)


def test_other_releases_and_the_interpreter_keep_their_own_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(prepared(_copy), Prepared)
    assert prepared(print) is print
    for version in ((3, 5), (3, 10), (4, 0)):
        monkeypatch.setattr(launch, "_VERSION", version)
        assert prepared(_copy) is _copy


def test_all_kernels_are_prepared() -> None:
    found = [
        value
        for module in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + ".")
        for name, value in vars(importlib.import_module(module.name)).items()
        if name.endswith("_kernel")
    ]
    assert len(found) > 30
    assert all(isinstance(value, Prepared) for value in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_descriptors_of_one_form_are_those_that_triton_makes(dtype: torch.dtype) -> None:
    base = torch.zeros(128, 64, dtype=dtype)
    for x in (base[:96], base[32:], base[:32], base.view(64, 128)[:, :64], base[:96]):
        for rows in (16, 32, 16):
            assert operand(x, rows, 32, False) is x
            made = operand(x, rows, 32, True)
            checked = TensorDescriptor.from_tensor(x, [rows, 32])
            assert isinstance(made, TensorDescriptor)
            assert made.base is x
            assert {**vars(made), "base": 0} == {**vars(checked), "base": 0}


def test_a_descriptor_of_unaligned_memory_is_refused_each_time() -> None:
    memory = torch.zeros(64 * 64 + 1)
    operand(memory[:-1].view(64, 64), 16, 64, True)
    for _ in range(2):
        with pytest.raises(AssertionError, match="16-byte aligned"):
            operand(memory[1:].view(64, 64), 16, 64, True)
