"""A device that is out of memory: where, what the plan said, and what takes less."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.distributed.ledger import Ledger
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.planner import beside_tensors, rank_memory
from megalite.run.batch_plan import num_micro_batches
from megalite.run.pipeline_schedule import make_schedule, modelled_durations
from megalite.run.stages import stages_of
from megalite.schedules import simulate
from megalite.train import memory_error
from megalite.train.loop import Trainer
from megalite.train.memory_error import explained_out_of_memory
from tests.train.kit.runs import GLOBAL_BATCH, make_config, write_tokens


class Device:
    """Has room for a number of calls of one operation."""

    def __init__(self, operation: Any, num_calls: int) -> None:
        self._operation, self._left = operation, num_calls

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self._operation(*arguments, **named)


def fill_in_a_forward(trainer: Trainer) -> None:
    """In the second microbatch, in the third layer."""
    attention: Any = trainer.engine.chunks[0].layers[2].attention
    attention.core = Device(attention.core, 1)


def fill_in_a_backward(trainer: Trainer) -> None:
    """Behind the head, in the last layer."""
    context = trainer.engine.chunks[0].context
    device = Device(context.ops.linear_input_grad, 1)
    ops = dataclasses.replace(context.ops, linear_input_grad=device)
    object.__setattr__(context, "ops", ops)


def fill_in_a_recomputation(trainer: Trainer) -> None:
    """In the first backward, of the last layer."""
    attention: Any = trainer.engine.chunks[0].layers[3].attention
    attention.core = Device(attention.core, 1)


def fill_in_the_optimizer(trainer: Trainer) -> None:
    trainer.engine.optimizer.step = Device(trainer.engine.optimizer.step, 1)


PASS = "phase 'forward and backward', action"
HEADS = "layers.{0}.attention.qkv.weight to layers.{0}.attention.out.weight"


@pytest.mark.parametrize(
    ("fill", "recompute", "place"),
    [
        (
            fill_in_a_forward,
            "none",
            f"step 1, {PASS} F0.1 (microbatch 1 of stage 0), in SelfAttention.forward "
            f"({HEADS.format(2)})",
        ),
        (
            fill_in_a_backward,
            "none",
            f"step 1, {PASS} BW0.0 (microbatch 0 of stage 0), in RowParallelLinear.backward "
            "(layers.3.mlp.down.weight)",
        ),
        (
            fill_in_a_recomputation,
            "full",
            f"step 1, {PASS} BW0.0 (microbatch 0 of stage 0), in SelfAttention.forward "
            f"({HEADS.format(3)})",
        ),
        (fill_in_the_optimizer, "none", "step 2, phase 'optimizer'"),
    ],
    ids=["forward", "backward", "recomputation", "optimizer"],
)
def test_the_place_is_named(
    fill: Callable[[Trainer], None], recompute: str, place: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "data", 6 * GLOBAL_BATCH)
    config = make_config(tmp_path, "run", train__recompute=recompute, train__micro_batch=1)
    mesh = Mesh(Topology())
    trainer = Trainer(config, mesh)
    fill(trainer)
    with pytest.raises(torch.OutOfMemoryError) as caught, explained_out_of_memory(config, mesh):
        trainer.run()
    where, planned, remedies = caught.value.__notes__[-3:]
    assert where == f"out of memory on rank 0: {place}"
    assert planned.startswith("planned in MiB: weights ")
    assert remedies.startswith("one of these takes less memory: ")


def test_it_may_come_before_the_first_step(tmp_path: Path) -> None:
    mesh: Any = SimpleNamespace(
        ledger=Ledger("rank 0"), pp=SimpleNamespace(rank=0), device=torch.device("cpu")
    )
    config = make_config(tmp_path, "run")
    with pytest.raises(torch.OutOfMemoryError) as caught, explained_out_of_memory(config, mesh):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert caught.value.__notes__[0] == "out of memory on rank 0: phase 'set-up'"


def test_other_errors_get_no_notes(tmp_path: Path) -> None:
    error = RuntimeError("shape mismatch")
    mesh: Any = None
    with pytest.raises(RuntimeError), explained_out_of_memory(make_config(tmp_path, "run"), mesh):
        raise error
    assert not hasattr(error, "__notes__")


def test_the_plan_of_this_rank_stands_beside_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, "run", "3d", model__hidden_size=4096, model__num_layers=8)
    schedule = make_schedule(config, num_micro_batches(config))
    stages, timeline = (
        stages_of(config, schedule.place),
        simulate(schedule, modelled_durations(config)),
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * 2**30))
    texts = []
    for rank, memory in enumerate(rank_memory(config, stages, schedule, timeline)):
        mesh: Any = SimpleNamespace(pp=SimpleNamespace(rank=rank), device=torch.device("cuda"))
        texts.append(memory_error._planned(config, mesh))
        assert f"optimizer {memory.states.optimizer / 2**30:.2f}, activations " in texts[-1]
        assert f", together {memory.total / 2**30:.2f}; " in texts[-1]
        assert f" some {beside_tensors(memory.total) / 2**30:.2f} more, and the " in texts[-1]
        assert texts[-1].endswith("the device has 80.00")
    assert texts[0] != texts[1]


def test_what_takes_less_memory(tmp_path: Path) -> None:
    config = make_config(tmp_path, "run", "dp2", train__micro_batch=2)
    assert memory_error._remedies(config) == (
        "one of these takes less memory: optimizer.zero=1; train.loss_chunk_tokens=2048; "
        "train.micro_batch=1; train.recompute=selective; parallel.tp=2 parallel.dp=1; "
        "parallel.pp=2 parallel.dp=1; `megalite plan CONFIG --hardware NAME` reports which of them "
        "fit"
    )
    done = make_config(
        tmp_path, "run", train__loss_chunk_tokens=8, train__recompute="full", optimizer__zero=1
    )
    assert "take more ranks" in memory_error._remedies(done)
