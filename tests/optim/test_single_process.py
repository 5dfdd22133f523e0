"""One process: the optimizer against torch's AdamW, and its policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.config import OptimizerConfig
from megalite.distributed.mesh import Mesh
from megalite.kernels.plain.adamw import square_sum
from megalite.layout.topology import Topology
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.norm import NonFiniteGradientError, clip_coefficient
from tests.optim.kit.synthetic import (
    accumulate,
    expected,
    make,
    make_chunks,
    relative_error,
    train,
    worst_error,
)


@pytest.fixture(name="mesh")
def one_rank_mesh() -> Mesh:
    return Mesh(Topology())


@pytest.mark.parametrize("clip_grad", [None, 0.1, 40.0, 1e6])
@pytest.mark.parametrize("zero", [0, 1])
def test_equals_torch_adamw(mesh: Mesh, clip_grad: float | None, zero: int) -> None:
    settings: dict[str, Any] = {"clip_grad": clip_grad, "weight_decay": 0.3, "beta1": 0.8}
    chunks, optimizer = make(mesh, zero=zero, **settings)
    results = train(chunks, optimizer, mesh, 4)
    want = expected(4, OptimizerConfig.model_validate(settings))
    assert [r.grad_norm for r in results] == pytest.approx(want.norms, rel=1e-12)
    assert worst_error(chunks, optimizer, mesh, want) < 1e-12
    assert [r.num_updates for r in results] == [1, 2, 3, 4]


def test_decay_groups_matter(mesh: Mesh) -> None:
    """With every gradient zero, only decayed parameters move, and by lr * decay exactly."""
    chunks, optimizer = make(mesh, weight_decay=0.5)
    before = [p.detach().clone() for p, _ in chunks[0].named_params()]
    optimizer.begin_step()
    optimizer.step(0.1)
    for (param, spec), old in zip(chunks[0].named_params(), before, strict=True):
        factor = 1 - 0.1 * 0.5 if spec.decay else 1.0
        assert torch.equal(param.detach(), old * factor), spec.name


def test_zero_rate_changes_moments_only(mesh: Mesh) -> None:
    chunks, optimizer = make(mesh)
    before = [p.detach().clone() for p, _ in chunks[0].named_params()]
    train(chunks, optimizer, mesh, 2, lr=0.0)
    after = [p.detach() for p, _ in chunks[0].named_params()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(s.tensor.abs().sum() > 0 for s in optimizer.named_state())


def test_frozen_parameters_stay(mesh: Mesh) -> None:
    chunks = make_chunks(mesh, torch.float64)
    frozen = [p for p, spec in chunks[0].named_params() if "layers.1" in spec.name]
    assert frozen
    for param in frozen:
        param.requires_grad_(False)
    config = OptimizerConfig(weight_decay=0.5)
    optimizer = DistributedOptimizer(chunks, mesh, config, torch.float64, torch.device("cpu"))
    before = [p.detach().clone() for p in frozen]
    train(chunks, optimizer, mesh, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, frozen, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_stop_names_the_parameter_and_touches_nothing(mesh: Mesh, bad: float) -> None:
    chunks, optimizer = make(mesh, non_finite="stop")
    train(chunks, optimizer, mesh, 1)
    before = [s.tensor.clone() for s in optimizer.named_state()]
    accumulate(chunks, optimizer, mesh, 1)
    param, spec = chunks[0].named_params()[3]
    chunks[0].grads.add(param, lambda buffer: buffer.view(-1)[1:2].fill_(bad))
    with pytest.raises(NonFiniteGradientError, match=f"update 2 .*{spec.name}.*non_finite"):
        optimizer.step(0.01)
    after = [s.tensor for s in optimizer.named_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.num_updates == 1


def test_too_many_skips_in_a_row_stop(mesh: Mesh) -> None:
    chunks, optimizer = make(mesh, non_finite="skip", max_skips=2)
    param = chunks[0].named_params()[0][0]

    def poisoned_step(step: int) -> bool:
        accumulate(chunks, optimizer, mesh, step)
        chunks[0].grads.add(param, lambda buffer: buffer.fill_(float("nan")))
        return optimizer.step(0.01).skipped

    assert poisoned_step(0)
    assert poisoned_step(1)
    assert optimizer.scalars() == {"num_updates": 0, "num_skips": 2}
    assert not train(chunks, optimizer, mesh, 1, first_step=2)[0].skipped
    assert optimizer.scalars() == {"num_updates": 1, "num_skips": 0}
    assert poisoned_step(3)
    assert poisoned_step(4)
    with pytest.raises(NonFiniteGradientError, match=r"2 skipped steps in a row.*max_skips"):
        poisoned_step(5)


def test_bfloat16_masters_follow_a_float32_run(mesh: Mesh) -> None:
    """Masters, not the rounded weights, carry the run: small steps are not lost."""
    chunks, optimizer = make(mesh, torch.bfloat16, clip_grad=None, weight_decay=0.0)
    start = {s.name: s.tensor.clone() for s in optimizer.named_state()}
    train(chunks, optimizer, mesh, 5, lr=1e-5)
    for state in optimizer.named_state():
        assert state.tensor.dtype == torch.float32
        if state.name.startswith("param/"):
            moved = (state.tensor - start[state.name]).abs().max()
            assert 1e-6 < moved < 1e-4
    masters = {s.name: s.tensor for s in optimizer.named_state()}
    for param, spec in chunks[0].named_params():
        master = masters[f"param/{spec.name}"].view(param.shape)
        assert torch.equal(param.detach(), master.bfloat16())


def test_square_sum_of_a_long_float32_tensor_is_summed_in_float64() -> None:
    """Summing in float32 is off by 1e-7 and more here; the order of sums moves 2e-13."""
    x = torch.randn((1 << 22) + 77, generator=torch.Generator().manual_seed(1))
    assert relative_error(square_sum(x)[None], x.double().square().sum()[None]) < 1e-12


def test_clip_coefficient() -> None:
    assert clip_coefficient(3.0, None) == 1.0
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clip_coefficient(0.0, 1.0) == 1.0
