"""The model on interpreted kernels over two tensor-parallel ranks is the model on plain torch."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from megalite.config import KernelsConfig, RunConfig
from megalite.distributed import comm
from megalite.train.engine import Engine
from tests.parity.case import Case, config_of, rank_batches
from tests.pool import RankPool

Backend = Literal["reference", "interpret"]
STEPS = 2
CASES = {
    "llama": Case(tp=2, sp=True, kv_heads=2, mask="documents", m=1),
    "gpt2": Case(tp=2, family="gpt2", dropout=True, tied=True, m=1, recompute="selective"),
    "gated gelu": Case(tp=2, family="gated gelu", m=1, recompute="selective"),
    "layers": Case(tp=2, sp=True, family="layers", m=1, mask="documents"),
    "after": Case(tp=2, family="after", m=1),
    "multipliers": Case(tp=2, sp=True, family="multipliers", kv_heads=2, m=1),
    "qwen3": Case(tp=2, sp=True, family="qwen3", kv_heads=2, m=1, chunk_tokens=5),
}
# Of a tensor's norm. The gradients' path through two layers in float32 adds up to several roundings
# of 1e-7 of values that partly cancel.
BOUND = 2e-6


def config_for(case: Case, backend: Backend) -> RunConfig:
    config = config_of(case, 2 if case.family == "llama" else 1)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"hidden_size": 64, "head_dim": 16}),
            "train": config.train.model_copy(update={"dtype": "float32"}),
            # an eps that no second moment is small against: updates are smooth in the gradients
            "optimizer": config.optimizer.model_copy(update={"eps": 1e-2}),
            "kernels": KernelsConfig(backend=backend),
        }
    )


def train(
    ctx: Any, name: str, backend: Backend
) -> tuple[str, list[float], dict[str, torch.Tensor]]:
    """Backend in use, losses, and this rank's gradients and weights after the last step."""
    case = CASES[name]
    mesh = ctx.mesh(tp=2)
    engine = Engine(config_for(case, backend), mesh)
    losses, tensors = [], {}
    for step in range(STEPS):
        loss, _ = engine.train_step(rank_batches(case, step, 0), 1e-2)
        losses.append(float(comm.all_reduce(loss, mesh.world)))
        for state in engine.optimizer.named_grads():
            tensors[f"{step} {state.name}"] = state.tensor.clone()
    for chunk in engine.chunks:
        for param, spec in chunk.named_params():
            tensors[spec.name] = param.detach().clone()
    return engine.ops.name, losses, tensors


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_plain_torch(pool: RankPool, name: str) -> None:
    plain, fused = (pool.run(train, 2, name, backend) for backend in ("reference", "interpret"))
    for (plain_name, losses, want), (fused_name, got_losses, got) in zip(plain, fused, strict=True):
        assert (plain_name, fused_name) == ("reference", "interpret")
        assert got_losses == pytest.approx(losses, rel=BOUND)
        assert want.keys() == got.keys()
        for key, expected in want.items():
            error = (got[key] - expected).norm() / expected.norm().clamp_min(1e-6)
            assert error <= BOUND, (key, float(error))
