"""The planner's bytes against those of the real model, optimizer and autograd graph."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from megalite.config import RunConfig
from megalite.planner.activations import microbatch_bytes
from megalite.planner.states import rank_states
from megalite.run.parameters import stage_parameters
from megalite.run.pipeline_schedule import make_schedule
from megalite.run.stages import stages_of
from megalite.train.engine import Engine
from tests.parity.case import Case, config_of, rank_batches
from tests.pool import RankPool
from tests.tensor_parallel.kit.memory import AllocationMeter

Changes = dict[str, Any]

LAYOUTS: list[tuple[Case, Changes]] = [
    (Case(m=2, micro_batch=4), {}),
    (Case(m=2, micro_batch=4, pp=3), {}),
    (Case(m=2, micro_batch=4, pp=3, recompute="selective"), {}),
    (Case(m=2, micro_batch=4, pp=2, vpp=2, schedule="interleaved", recompute="full"), {}),
    (Case(m=2, micro_batch=4, pp=2, family="qwen3", tied=True), {}),
    (Case(m=2, micro_batch=4, pp=2, family="gpt2", chunk_tokens=7), {}),
    (Case(m=2, micro_batch=4, pp=2, vocab=513, chunk_tokens=16), {}),
    (Case(m=2, micro_batch=4, tp=2, sp=True, pp=2, tied=True, kv_heads=2), {}),
    (Case(m=2, micro_batch=4, tp=2, pp=2, vpp=2, schedule="zb-v", tied=True), {}),
    (Case(m=2, micro_batch=4, tp=2, sp=True, dp=2, zero=1, vocab=131), {}),
    (Case(m=2, dp=4, zero=1), {"optimizer": {"bucket_mb": 0.01, "name": "muon", "ema_decay": 0.9}}),
    (Case(m=2, dp=2, zero=0, family="qwen2"), {"optimizer": {"bucket_mb": 0.02, "ema_decay": 0.9}}),
    (Case(m=2, micro_batch=4, pp=2), {"train": {"dtype": "float32"}}),
    (
        Case(m=2, micro_batch=4, pp=3),
        {"model": {"residual_dropout": 0.1, "embedding_dropout": 0.1}, "train": {"z_loss": 1e-3}},
    ),
    (Case(m=2, micro_batch=4, pp=3), {"model": {"activation": "geglu", "mlp_bias": True}}),
    (Case(m=2, micro_batch=4, pp=3), {"model": {"activation": "gelu"}}),
    (Case(m=2, micro_batch=4, pp=3), {"model": {"activation": "relu2"}}),
    (
        Case(m=2, micro_batch=4, pp=3, family="multipliers"),
        {"model": {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 2.0}},
    ),
    (Case(m=2, micro_batch=4, pp=3, family="after"), {}),
    # a window that hides nothing: where it does, torch keeps scores on the CPU
    (Case(m=2, micro_batch=4, pp=3, family="layers"), {"model": {"sliding_window": 16}}),
    (Case(m=2, micro_batch=4, pp=3, family="parallel"), {}),
    (  # so narrow a feed-forward that its working memory is no multiple of 32 columns
        Case(m=2, micro_batch=4, pp=3),
        {
            "model": {
                "hidden_size": 8,
                "num_heads": 1,
                "num_kv_heads": 1,
                "head_dim": 4,
                "ffn_hidden_size": 8,
            }
        },
    ),
]


def planned(case: Case, changes: Changes) -> RunConfig:
    """Changes are by section; kernels are named, as "auto" is planned as Triton."""
    config = config_of(case, 2 * case.pp * case.vpp)
    sections = {"kernels": {"backend": "reference"}, **changes}
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=values)
            for name, values in sections.items()
        }
    )


def measured(chunk: Any, batch: Any) -> tuple[int, int, int]:
    """Bytes that a microbatch of a chunk holds after its forward, after its input gradient with the
    weight gradients put off, and at most in a whole backward beside the first of these.
    """
    hidden, dtype = chunk.config.hidden_size, chunk.context.dtype
    tokens = len(batch.token_T) // (chunk.context.tp.size if chunk.context.sequence_parallel else 1)
    queue: list[Any] = []

    def forward() -> Any:
        x = None if chunk.first else torch.randn(tokens, hidden, dtype=dtype).requires_grad_()
        return chunk.forward(x, batch)

    with AllocationMeter() as meter:
        y = forward()
        output = 0 if chunk.last else y.untyped_storage().nbytes()  # freed once it is sent
        after_forward = meter.alive_bytes - output
        chunk.grads.deferred = queue
        y.backward(torch.ones_like(y))
        chunk.grads.deferred = None
        del y
        after_input_grad = meter.alive_bytes
    queue.clear()
    with AllocationMeter() as meter:
        y = forward()
        before = meter.peak_bytes = meter.alive_bytes
        y.backward(torch.ones_like(y))
    return after_forward, after_input_grad, meter.peak_bytes - before


def rank_bytes(ctx: Any, case: Case, changes: Changes) -> tuple[Any, list[Any]]:
    """Of this rank: (states planned, states counted), and (planned, measured) of every chunk.

    A collective's buffer may die a moment late: the least of three measurements.
    """
    mesh = ctx.mesh(tp=case.tp, pp=case.pp, dp=case.dp)
    engine = Engine(planned(case, changes), mesh)
    place = make_schedule(engine.config, case.m).place
    mine = [stage for stage in stages_of(engine.config, place) if stage.rank == mesh.pp.rank]
    batches = rank_batches(case, 0, mesh.dp.rank)
    engine.train_step(batches, 0.0)  # what is made once is there afterwards
    report = engine.optimizer.memory_report()
    counted = (report.num_parameters, report.param_bytes, report.grad_bytes, report.state_bytes)
    chunks = []
    for stage, chunk in zip(mine, engine.chunks, strict=True):
        assert stage_parameters(
            engine.config.model, stage, engine.config.parallel.sequence_parallel
        ) == [spec for _, spec in chunk.named_params()]
        triples = [measured(chunk, batches[0]) for _ in range(3)]
        least = [min(column) for column in zip(*triples, strict=True)]
        chunks.append((stage, microbatch_bytes(engine.config, stage), least))
    return (rank_states(engine.config, mine), counted), chunks


@pytest.mark.parametrize("sizes", [{"head_dim": 64}, {"ffn_hidden_size": 8}], ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_attention_that_outweighs_its_block_is_bounded(
    pool: RankPool, recompute: Literal["none", "selective", "full"], sizes: dict[str, int]
) -> None:
    """Then attention's backward takes most; on the CPU with copies of torch's own."""
    case = Case(m=2, micro_batch=4, pp=3, recompute=recompute)
    results = pool.run(rank_bytes, case.world_size, case, {"model": sizes})
    for _, [(stage, held, (after_forward, _, working))] in results[:2]:
        assert not stage.last
        assert after_forward == pytest.approx(held.activations, rel=1e-3)
        assert 0.7 * held.working < working < 1.1 * held.working


@pytest.mark.parametrize(("case", "changes"), LAYOUTS, ids=str)
def test_bytes_are_those_of_the_real_thing(pool: RankPool, case: Case, changes: Changes) -> None:
    for (states, counted), chunks in pool.run(rank_bytes, case.world_size, case, changes):
        planned_states = (states.num_parameters, states.weights, states.gradients, states.optimizer)
        assert planned_states == counted
        for stage, held, (after_forward, after_input_grad, working) in chunks:
            assert after_forward == pytest.approx(held.activations, rel=1e-3)
            if not (
                (stage.tied == "beside") and stage.last
            ):  # its head's gradient goes to the other chunk
                assert after_input_grad == pytest.approx(held.deferred, rel=1e-3)
            if case.tp > 1:
                continue  # gloo's buffers of collectives come and go meanwhile
            if stage.last:  # by then the logits are free
                assert working <= held.working
            else:
                assert working == pytest.approx(held.working, rel=0.01)
