"""The training part of gpu_gate: steps of a 1B Llama on the one GPU, by megalite's own engine.

Each sequence length gives a row: tokens/s, model FLOPs utilisation in both conventions (all of the
attention scores, and the causal half), peak memory beside the planner's, the split of a step into
forward, backward and optimizer by events on the device, and the kernels that take most of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gate.device import Gate, Late, Row
from megalite.checks import check_and_resolve
from megalite.config import (
    DataConfig,
    KernelsConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from megalite.distributed.clock import Clock, seconds_between
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.planner import rank_memory
from megalite.record import metrics
from megalite.run.model_math import parameter_counts
from megalite.run.pipeline_schedule import make_schedule, modelled_durations
from megalite.run.stages import stages_of
from megalite.schedules import simulate
from megalite.train.batch import TokenBatch
from megalite.train.engine import Engine

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "llama-1b.toml"
LENGTHS = (4096, 8192)
_MICRO_TOKENS, _MICRO_BATCHES = 16384, 2
_WARMUP, _STEPS = 3, 6
_FIRST_S, _NEXT_S = 45.0, 30.0  # a run with compilation, and without
_LR = 3e-4
_TOP = 12  # kernels named in the profile


def train(gate: Gate) -> None:
    """Steps at every length with Triton, then at the first with plain torch beside it.

    A dry run has no steps in the interpreter here: the part that compares losses has.
    """
    runs = [] if gate.dry else [(length, "triton") for length in LENGTHS]
    needed = _FIRST_S
    for length, backend in [*runs, (8 if gate.dry else LENGTHS[0], "reference")]:
        row: Row = {"seq_length": length, "backend": backend}
        try:
            gate.require(0.0 if gate.dry else needed, f"training at {length} on {backend}")
            with gate.guarded(row):
                gate.emit({**row, **measure(gate, length, backend)})
        except Late as error:
            gate.emit({**row, "skipped": [f"training {length} {backend}"], "reason": str(error)})
        needed = _NEXT_S


def config_of(
    gate: Gate, length: int, backend: str, *, num_layers: int = 0, micro_batch: int = 0
) -> RunConfig:
    """The resolved config of one GPU; a dry run has a tiny model in float32, of one layer.

    0: all layers of the model, and as many sequences as have _MICRO_TOKENS together.
    """
    model = ModelConfig(**tomllib.loads(MODEL.read_text(encoding="utf-8"))["model"])
    if gate.dry:
        tiny = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1,
                "ffn_hidden_size": 48, "vocab_size": 96}  # fmt: skip
        model = ModelConfig(**{**model.model_dump(exclude_unset=True), **tiny})
    if num_layers:
        model = model.model_copy(update={"num_layers": num_layers})
    micro = micro_batch or (1 if gate.dry else max(1, _MICRO_TOKENS // length))
    config = RunConfig(
        model=model,
        optimizer=OptimizerConfig(lr=_LR, lr_schedule="constant", clip_grad=1.0),
        data=DataConfig(seq_length=length),
        train=TrainConfig(
            steps=1,
            global_batch=micro if gate.dry else micro * _MICRO_BATCHES,
            micro_batch=micro,
            dtype="float32" if gate.dry else "bfloat16",
        ),
        kernels=KernelsConfig(backend=backend),  # type: ignore[arg-type]
    )
    return check_and_resolve(config, 1)


def batches_of(gate: Gate, config: RunConfig, step: int) -> list[TokenBatch]:
    """Random tokens, each sequence a document."""
    length, micro = config.data.seq_length, config.train.micro_batch
    total = config.train.global_batch * length
    batches = []
    for index in range(config.train.global_batch // micro):
        tokens = gate.integers(config.model.vocab_size, micro, length + 1, seed=97 * step + index)
        batches.append(
            TokenBatch(
                token_T=tokens[:, :-1].flatten(),
                label_T=tokens[:, 1:].flatten(),
                weight_T=torch.full((micro * length,), 1 / total, device=gate.device).double(),
                cu_seqlens=list(range(0, micro * length + 1, length)),
            )
        )
    return batches


def measure(gate: Gate, length: int, backend: str) -> Row:
    """Train for some steps; the figures are those of the median step."""
    config = config_of(gate, length, backend)
    mesh = Mesh(Topology(), gate.device)
    mesh.create()
    engine = Engine(config, mesh)
    if gate.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(gate.device)
    warmup, steps = (1, 1) if gate.dry else (_WARMUP, _STEPS)
    losses, seconds = [], []
    clock = Clock(gate.device)
    for step in range(warmup + steps):
        batches = batches_of(gate, config, step)
        gate.synchronize()
        began = clock.mark()
        loss, _ = engine.train_step(batches, _LR)
        engine.optimizer.wait_params()
        seconds.append(seconds_between(began, clock.mark()))
        losses.append(float(loss))
    step_s = median(seconds[warmup:])
    rates = metrics.step_rates(
        config.train.global_batch, step_s, 1, config, metrics.describe_device(gate.device, config)
    )
    batches = batches_of(gate, config, warmup + steps)
    row: Row = {
        "parameters": parameter_counts(config.model).total(),
        "dtype": config.train.dtype,
        "micro_batch": config.train.micro_batch,
        "global_batch": config.train.global_batch,
        "step_ms": step_s * 1e3,
        "tokens_per_s": rates.tokens_per_s_per_gpu,
        "tflops": rates.model_tflops_per_gpu,
        "mfu": rates.mfu,
        "mfu_causal": rates.mfu_causal,
        "memory_peak_bytes": metrics.memory_peak_bytes(gate.device),
        "memory_planned_bytes": planned_bytes(config),
        "losses": [losses[0], losses[-1]],
        "split_ms": split(engine, clock, batches),
        "profile": profile(gate, engine, batches),
    }
    if not all(map(_is_finite, losses)):
        raise RuntimeError(f"losses are not finite: {losses}; the row would have been {row}")
    return row


def planned_bytes(config: RunConfig) -> int:
    """What the planner says that the one rank takes in tensors."""
    schedule = make_schedule(config, config.train.global_batch // config.train.micro_batch)
    timeline = simulate(schedule, modelled_durations(config))
    stages = stages_of(config, schedule.place)
    return rank_memory(config, stages, schedule, timeline)[0].total


def _is_finite(x: float) -> bool:
    return x - x == 0.0


def split(engine: Engine, clock: Clock, batches: Sequence[TokenBatch]) -> dict[str, float]:
    """Milliseconds of one step's forwards, backwards and optimizer."""
    engine.forward_backward(batches, trace=True)
    began = clock.mark()
    engine.optimizer.step(_LR)
    engine.optimizer.wait_params()
    optimizer_s = seconds_between(began, clock.mark())
    parts = {"forward": 0.0, "backward": 0.0, "optimizer": optimizer_s * 1e3}
    for action, start, end in engine.runtime.trace:
        if action.kind in ("F", "BW", "B", "W"):
            parts["forward" if action.kind == "F" else "backward"] += (end - start) * 1e3
    return parts


def profile(gate: Gate, engine: Engine, batches: Sequence[TokenBatch]) -> list[list[Any]]:
    """[kernel or operation, share of the time of all of them, calls] of one step, longest first."""
    name = "self_device_time_total" if gate.device.type == "cuda" else "self_cpu_time_total"
    found = profiled(gate, lambda: engine.train_step(batches, _LR))
    events = [(event.key, getattr(event, name), event.count) for event in found]
    total = sum(spent for _, spent, _ in events) or 1.0
    events.sort(key=lambda event: -event[1])
    return [[key[:80], round(spent / total, 4), count] for key, spent, count in events[:_TOP]]


def profiled(gate: Gate, call: Callable[[], object]) -> list[Any]:
    """The profiler's averages over a call, a name each: of the device, or on CPU of the host."""
    kind = torch.profiler.ProfilerActivity
    activity = kind.CUDA if gate.device.type == "cuda" else kind.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        call()
        gate.synchronize()
    return list(profiler.key_averages())
