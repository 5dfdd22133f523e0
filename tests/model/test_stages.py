"""The model cut into stages, some of them without layers, gives the bits of the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.kernels import Kernels
from megalite.kernels.plain.attention import document_mask
from megalite.layout.sharding import ShardSpec
from megalite.model.norm import Norm
from megalite.run.parameters import ModelStage, Tying
from megalite.tensor_parallel.context import LayerContext
from tests.model.kit.small import (
    gradients,
    make_batch,
    make_stage,
    model_config,
    relative_error,
)
from tests.tolerances import PLAIN_FLOAT64

CUTS = [[2], [1, 1], [0, 2], [2, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 2, 0]]


def run_stages(config, counts, batch, **options):
    """Loss and gradients with each boundary crossed as between two processes."""
    stages, start = [], 0
    for index, count in enumerate(counts):
        first, last = index == 0, index == len(counts) - 1
        at_end: Tying = "within" if first and last else "copied" if first or last else "no"
        tied: Tying = at_end if config.tie_embeddings else "no"
        layers = range(start, start + count)
        stages.append(make_stage(config, ModelStage(index, layers, first, last, tied), **options))
        start += count
    inputs: list[Tensor | None] = []
    outputs: list[Tensor] = []
    x: Tensor | None = None
    for stage in stages:
        x = None if x is None else x.detach().requires_grad_()
        inputs.append(x)
        x = stage(x, batch)
        outputs.append(x)
    grad = None
    for x, y in zip(reversed(inputs), reversed(outputs), strict=True):
        torch.autograd.backward((y,), (grad,))
        grad = None if x is None else x.grad
    return outputs[-1].detach(), gradients(*stages), stages


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("counts", CUTS, ids=str)
def test_stages_equal_the_whole_model(counts, tied) -> None:
    config, batch = model_config(tie_embeddings=tied), make_batch()
    want = run_stages(config, [2], batch)
    loss, grads, stages = run_stages(config, counts, batch)
    assert torch.equal(loss, want[0])
    assert grads.keys() == want[1].keys()
    for name, grad in want[1].items():
        assert relative_error(grads[name], grad) <= PLAIN_FLOAT64, name
    for stage, count in zip(stages, counts, strict=True):
        assert len(stage.sections()) == count + 2
    middle = [s for s, n in zip(stages, counts, strict=True) if not (n or s.first or s.last)]
    assert all(stage.named_params() == [] for stage in middle)


@pytest.mark.parametrize("count", [1, 2])
def test_tied_copy_is_marked_and_not_counted_twice(count) -> None:
    config = model_config(tie_embeddings=True)
    stages = run_stages(config, [2] if count == 1 else [1, 1], make_batch())[2]
    specs = [s for stage in stages for _, s in stage.named_params() if s.shape == (32, 16)]
    assert [(s.name, s.counted) for s in specs] == [
        ("embedding.weight", i == 0) for i in range(count)
    ]
    assert [s.tied for s in specs] == [count > 1] * count
    assert sum(s.contributions for s in specs) == 2  # look-up and head


def norm_gradient(ctx, sp):
    """Weight gradient of a norm on this rank's tokens, its spec, and what one process gets."""
    mesh = ctx.mesh(tp=ctx.world_size)
    context = LayerContext(mesh.tp, torch.float64, mesh.device, sequence_parallel=sp)
    norm = Norm(context, model_config(), ShardSpec("final_norm.weight", (6,), partial=sp))
    torch.nn.init.ones_(norm.weight)
    x, dy = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    part = slice(mesh.tp.rank * 8 // context.tp.size, (mesh.tp.rank + 1) * 8 // context.tp.size)
    part = part if sp else slice(None)
    norm(x[part].clone().requires_grad_())[1].backward(dy[part])
    rstd = (x.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    spec = norm.specs["weight"]
    return context.grads.buffer(norm.weight), (x * rstd * dy).sum(0), spec.partial


@pytest.mark.parametrize(("tp", "sp"), [(2, False), (2, True), (4, True)])
def test_norm_gradient_is_marked_partial_just_when_it_is(pool, tp, sp) -> None:
    grads, wants, partial = zip(*pool.run(norm_gradient, tp, sp), strict=True)
    assert set(partial) == {sp}
    total = torch.stack(grads).sum(0) if sp else grads[0]
    assert relative_error(total, wants[0]) <= PLAIN_FLOAT64
    if sp:
        assert relative_error(grads[0], wants[0]) > 0.1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_mask_serves_all_stages_and_microbatches_of_the_same_documents(recompute) -> None:
    made = []

    def mask(cu_seqlens, window, device):
        made.append((cu_seqlens, window))
        return document_mask(cu_seqlens, window, device)

    ops, config = replace(Kernels(), attention_mask=mask), model_config()
    batch, other = make_batch(cuts=(3,)), make_batch(cuts=(5,))
    shared = [batch, replace(batch), replace(other, masks=batch.masks)]
    for each in shared:
        run_stages(config, [1, 0, 1], each, ops=ops, recompute=recompute)
    assert made == [(batch.cu_seqlens, None), (other.cu_seqlens, None)]

    # another window needs another mask, another step makes its own
    run_stages(model_config(sliding_window=2), [2], batch, ops=ops)
    run_stages(config, [2], make_batch(cuts=(3,)), ops=ops)
    assert made[2:] == [(batch.cu_seqlens, 2), (batch.cu_seqlens, None)]
