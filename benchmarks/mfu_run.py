"""What mfu.py starts: one config, trained for some steps without evaluation or checkpoints.

    python benchmarks/mfu_run.py JSON    (the keys are those that mfu.py writes)

All ranks of the config take part, started here or by a launcher; rank 0 writes the row.
"""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from megalite.checks import open_run
from megalite.config import RunConfig
from megalite.corpus.indexed_writer import IndexedWriter
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.process.env import pick_device
from megalite.process.gpu_variables import prepare_gpus
from megalite.process.launcher import Launch, read_launch
from megalite.process.local import run_local
from megalite.process.signals import SignalFlag
from megalite.record import metrics
from megalite.record.console import Console
from megalite.record.records import TIME_PARTS, read_metrics
from megalite.record.run_record import StepEdge
from megalite.run.model_math import parameter_counts, training_flops
from megalite.train.loop import Trainer
from megalite.train.rank import run_rank_and_exit

# Random tokens in the synthetic data at most: longer measurements read it again.
_MAX_TOKENS = 4_000_000


class MeasuredTrainer(Trainer):
    """Trains and records, but saves and loads nothing. May trace the last step.

    trace: folder for the Chrome traces of the first and the last rank.
    """

    trace: str | None = None

    def _step(self, flag: SignalFlag) -> StepEdge:
        ends = (0, self.mesh.world.size - 1)
        is_last = self.step + 1 == self.at.total_steps
        if self.trace is None or not is_last or self.mesh.rank not in ends:
            return super()._step(flag)
        kind = torch.profiler.ProfilerActivity
        kinds = [kind.CPU, *([kind.CUDA] if self.mesh.device.type == "cuda" else [])]
        with torch.profiler.profile(activities=kinds) as profiler:
            edge = super()._step(flag)
        folder = Path(self.trace)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank-{self.mesh.rank}.json.gz"))
        return edge

    def _resume(self) -> None:
        pass

    def _save(self) -> None:
        self.at.saved_step = self.step


def main(order: dict[str, Any]) -> int:
    """Start or be the ranks of one config; returns the exit code."""
    launch = Launch() if order["local"] else read_launch()
    world_size = None if order["local"] else launch.world_size
    run = open_run(order["config"], order["settings"], world_size)
    config = for_measuring(run.config, order)
    prepare_gpus(config.folder)
    if order["local"]:
        timeout_s = config.train.timeout_s
        needed = Topology.of(config.parallel).world_size
        return run_local(measure, needed, (config, order), timeout_s=timeout_s)
    device = pick_device(launch)
    if launch.world_size == 1:
        return measure(launch, device, config, order)
    return run_rank_and_exit(measure, launch, device, (config, order), config.train.timeout_s)


def for_measuring(config: RunConfig, order: dict[str, Any]) -> RunConfig:
    """The config for just the steps to measure, with nothing to evaluate, its records in the work
    folder, and random data, all of it to train on.
    """
    data, train = config.data.model_copy(update={"split": (1.0, 0.0)}), config.train
    if not order["data"]:
        changes: dict[str, Any] = {
            "path": str(Path(order["work"]) / "tokens"),
            "sources": [],
            "tokenizer": None,
        }
        data = data.model_copy(update=changes)
    traced = order["trace"] is not None
    length = {"steps": order["warmup"] + order["steps"] + traced, "tokens": None}
    return config.model_copy(
        update={
            "out": order["work"],
            "data": data,
            "train": train.model_copy(update=length),
            "eval": config.eval.model_copy(update={"interval": 0, "sets": []}),
        }
    )


def measure(launch: Launch, device: torch.device, config: RunConfig, order: dict[str, Any]) -> int:
    """One rank: train for the warm-up and the steps that count; rank 0 writes the row."""
    mesh = Mesh(Topology.of(config.parallel), device, timeout_s=config.train.timeout_s)
    mesh.create()
    if not order["data"] and mesh.rank == 0:
        write_tokens(config, config.train.steps)
    comm.barrier(mesh.world)
    trainer = MeasuredTrainer(config, mesh, Console(quiet=True))
    trainer.trace = order["trace"]
    trainer.run()
    peak = torch.tensor([metrics.memory_peak_bytes(device)], dtype=torch.int64, device=device)
    comm.all_reduce(peak, mesh.world, op="max")
    hosts = set(comm.all_gather_object(socket.gethostname(), mesh.world))
    if mesh.rank == 0:
        row = row_of(trainer, order, int(peak), len(hosts))
        Path(order["result"]).write_text(json.dumps(row), encoding="utf-8")
    return 0


def write_tokens(config: RunConfig, steps: int) -> None:
    """Random documents of about half a sequence, enough for the steps or at most _MAX_TOKENS."""
    data, prefix = config.data, Path(str(config.data.path))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    samples = max(steps * config.train.global_batch, 1)
    left = min(samples, max(1, _MAX_TOKENS // data.seq_length)) * data.seq_length * 2 + 1
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, config.model.vocab_size) as writer:
        while left:
            length = min(left, int(generator.integers(1, data.seq_length + 1)))
            writer.add_document(generator.integers(0, config.model.vocab_size, length))
            left -= length
        writer.publish()


def row_of(trainer: Trainer, order: dict[str, Any], peak: int, hosts: int) -> dict[str, Any]:
    """The figures of the steps after the warm-up. Rates are those of the median step."""
    config, world_size = trainer.config, trainer.mesh.world.size
    lines = read_metrics(trainer.folder / "metrics.jsonl")
    counted = slice(order["warmup"], order["warmup"] + order["steps"])
    steps = [line for line in lines if line["kind"] == "step"][counted]
    seconds = median(line["step_time_s"] for line in steps)
    rates = metrics.step_rates(
        config.train.global_batch, seconds, world_size, config, trainer.device
    )
    flops = training_flops(config.model, config.data.seq_length)
    mean_s = fmean(line["step_time_s"] for line in steps)
    split = [line for line in steps if "time_compute_s" in line]  # the last one always
    split_s = sum(line["step_time_s"] for line in split)
    return {
        "benchmark": "mfu",
        "config": order["config"],
        "settings": order["settings"],
        "model": {
            "family": config.model.family,
            "parameters": parameter_counts(config.model).total(),
            "layers": config.model.num_layers,
            "hidden": config.model.hidden_size,
            "seq_length": config.data.seq_length,
        },
        "layout": layout(config),
        "hardware": {**asdict(trainer.device), "hosts": hosts},
        "world_size": world_size,
        "dtype": config.train.dtype,
        "warmup": order["warmup"],
        "steps": len(steps),
        "synthetic": not order["data"],
        "step_time_s": seconds,
        "step_time_mean_s": mean_s,
        "tokens_per_s_per_gpu": rates.tokens_per_s_per_gpu,
        "tflops_per_gpu": rates.model_tflops_per_gpu,
        "tflops_causal_per_gpu": rates.model_tflops_per_gpu * flops.total_causal / flops.total_full,
        "mfu": rates.mfu,
        "mfu_causal": rates.mfu_causal,
        "memory_peak_bytes": peak,
        "time_split": {
            part: sum(line[f"time_{part}_s"] for line in split) / split_s for part in TIME_PARTS
        },
        "loss": steps[-1]["loss"],
        "versions": metrics.versions(),
        "commit": metrics.git_commit(),
    }


def layout(config: RunConfig) -> dict[str, Any]:
    """What decides how the work is spread; `text` is it in short."""
    parallel, train = config.parallel, config.train
    schedule = config.pipeline.schedule if parallel.pp > 1 else None
    parts = [
        f"tp{parallel.tp}{'+sp' if parallel.sequence_parallel else ''}",
        f"pp{parallel.pp}" + (f"x{parallel.vpp}" if parallel.vpp > 1 else ""),
        f"dp{parallel.dp}",
        *([schedule] if schedule else []),
        f"zero{config.optimizer.zero}",
        f"micro {train.micro_batch} of {train.global_batch}",
        f"recompute {train.recompute}",
    ]
    return {
        "text": " ".join(parts),
        "tp": parallel.tp,
        "sequence_parallel": parallel.sequence_parallel,
        "pp": parallel.pp,
        "vpp": parallel.vpp,
        "dp": parallel.dp,
        "schedule": schedule,
        "zero": config.optimizer.zero,
        "micro_batch": train.micro_batch,
        "global_batch": train.global_batch,
        "recompute": train.recompute,
    }


if __name__ == "__main__":
    from megalite.errors import EXIT_USER, MegaliteError

    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except MegaliteError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(EXIT_USER)
