"""Recompute changes memory and traffic, never a bit of the result."""

from __future__ import annotations

import pytest
import torch

from megalite.model.init import init_params
from megalite.model.transformer import Transformer
from megalite.run.parameters import ModelStage
from megalite.tensor_parallel.context import LayerContext
from tests.model.kit.small import SEQ_LENGTH, gradients, make_batch, make_stage, model_config
from tests.pool import traffic
from tests.tensor_parallel.kit.memory import AllocationMeter

MODES = ["none", "selective", "full"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", MODES[1:])
def test_recompute_gives_the_same_bits(recompute, dtype) -> None:
    config, batch = model_config(), make_batch(cuts=(3, 4, 13))
    plain, other = (make_stage(config, dtype=dtype, recompute=r) for r in ("none", recompute))
    losses = [model(None, batch) for model in (plain, other)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for name, grad in gradients(plain).items():
        assert torch.equal(gradients(other)[name], grad), name


def kept_per_layer(recompute: str) -> float:
    """Bytes that one more layer keeps for the backward: (T = 64, D = 16, F = 20, float64)."""
    kept = []
    for layers in (2, 6):
        config = model_config(num_layers=layers)
        model, batch = make_stage(config, recompute=recompute), make_batch(num_sequences=8)
        with AllocationMeter() as meter:
            loss = model(None, batch)
            kept.append(meter.alive_bytes)
        assert loss.requires_grad
    return (kept[1] - kept[0]) / 4


def test_each_mode_keeps_less_than_the_one_before() -> None:
    """What a layer keeps, in elements a token, with D = 16, 8 key and value elements, F = 20."""
    none, selective, full = (kept_per_layer(mode) / (64 * 8) for mode in MODES)
    assert full == 16  # its input
    inputs, qkv, gate_up = 16 + 16 + 16 + 16 + 16, 16 + 2 * 8, 2 * 20
    assert selective <= inputs + qkv + gate_up + 4  # and two norms' statistics
    assert none == selective + 20 + 4  # the product of gate and up, the softmax's statistics


def train(ctx, sp, recompute) -> dict[str, dict[str, float]]:
    """Traffic of one microbatch through two layers, without embedding and head."""
    mesh, config = ctx.mesh(tp=ctx.world_size), model_config()
    context = LayerContext(mesh.tp, torch.float64, mesh.device, sequence_parallel=sp)
    middle = ModelStage(0, range(2), first=False, last=False)
    stage = Transformer(config, context, middle, seq_length=SEQ_LENGTH, recompute=recompute)
    init_params(stage.named_params(), 5, mesh.axis)
    batch = make_batch()
    x = torch.ones(len(batch.token_T) // (context.tp.size if sp else 1), 16, dtype=torch.float64)
    y = stage(x.requires_grad_(), batch)
    y.backward(torch.ones_like(y))
    return traffic(mesh.ledger)


@pytest.mark.long
@pytest.mark.parametrize("recompute", MODES)
def test_collectives_of_a_layer_are_those_of_theory(pool, recompute) -> None:
    """Four all-reduces a layer, or their halves and two gathers again of what the column layers
    read. Selective recompute adds none; full recompute repeats those of the forward."""
    layers, again = 2, recompute == "full"
    half = 16 * 16 * 8 / 2  # (tp - 1) / tp of [T, D] in float64
    plain = {"all_reduce/tp": {"calls": layers * (4 + 2 * again)}}
    parallel = {
        "all_gather/tp": {"calls": layers * (6 + 2 * again)},
        "reduce_scatter/tp": {"calls": layers * (4 + 2 * again)},
    }
    for sp, want in ((False, plain), (True, parallel)):
        for entry in want.values():
            entry["bytes_sent"] = entry["calls"] * half * (1 if sp else 2)
        assert pool.run(train, 2, sp, recompute) == [want] * 2
