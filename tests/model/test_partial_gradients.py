"""Which gradients are partial sums over tp, for every kind of parameter a family has.

The specs say it and the optimizer believes them; here each parameter's pieces over two ranks are
put together as its spec says and compared with one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.layout.sharding import ShardSpec
from megalite.model.dropout import DropoutAt
from megalite.model.transformer import Transformer
from megalite.run.parameters import whole_model
from megalite.tensor_parallel.context import LayerContext
from tests.model.kit.small import (
    SEQ_LENGTH,
    VARIANTS,
    gradients,
    make_batch,
    make_stage,
    model_config,
    relative_error,
)
from tests.tolerances import PLAIN_FLOAT64

BATCH = replace(make_batch(cuts=(3, 13)), dropout=DropoutAt(1, 2, 40))


def rank_gradients(
    ctx: Any, variant: str, sp: bool, whole: dict[str, Tensor]
) -> dict[str, tuple[ShardSpec, Tensor]]:
    """Runs in a rank: one microbatch through the whole model, unreduced gradients."""
    mesh, config = ctx.mesh(tp=2), model_config(**VARIANTS[variant])
    context = LayerContext(mesh.tp, torch.float64, mesh.device, sequence_parallel=sp)
    stage = Transformer(config, context, whole_model(config), seq_length=SEQ_LENGTH)
    with torch.no_grad():
        for param, spec in stage.named_params():
            value = whole[spec.name]
            if spec.cut_dim is not None:
                value = value.chunk(2, spec.cut_dim)[mesh.tp.rank]
            param.copy_(value)
    stage(None, BATCH).backward()
    return {s.name: (s, stage.grads.buffer(p).clone()) for p, s in stage.named_params()}


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("variant", ["gpt2", "qwen2", "qwen3", "mixed"])
def test_pieces_make_the_whole_as_their_specs_say(pool, variant, sp) -> None:
    model = make_stage(model_config(**VARIANTS[variant]))
    model(None, BATCH).backward()
    want = gradients(model)
    whole_weights = {s.name: p.detach() for p, s in model.named_params()}
    found = pool.run(rank_gradients, 2, variant, sp, whole_weights)
    partial = set()
    for name, whole in want.items():
        (spec, first), (_, second) = (rank[name] for rank in found)
        if spec.cut_dim is not None:
            assert not spec.partial
            got = torch.cat([first, second], spec.cut_dim)
        elif spec.partial:
            partial.add(name.split(".", 2)[-1])
            assert relative_error(first, whole) > 1e-3, f"{name} is whole already"
            got = first + second
        else:
            assert torch.equal(first, second), f"{name} differs between ranks"
            got = first
        assert relative_error(got, whole) <= 10 * PLAIN_FLOAT64, name
    assert ("attention.q_norm.weight" in partial) == model.config.qk_norm
    assert ("attention_norm.weight" in partial) == sp
