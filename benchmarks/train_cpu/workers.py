"""The contenders of the CPU training benchmark as workers of a lane: transformers and megalite.

Both train the same model on the same tokens with torch's fused AdamW and the norm clipped to 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from benchmarks.profile_kinds import OPTIMIZER_RANGE, STEP_RANGE, Profile, profile_step
from benchmarks.train_cpu.setup import (
    MODEL,
    OPTIMIZER,
    SEQ_LENGTH,
    STEP_TOKENS,
    Layout,
    config_of,
    rank_batches,
    step_tokens,
)
from megalite.distributed.clock import Mark, seconds_between
from megalite.distributed.mesh import Mesh
from megalite.train.batch import TokenBatch
from megalite.train.engine import Engine

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StepTime:
    """One rank's step: seconds on the wall and of processor time, and its part of the loss."""

    seconds: float
    cpu_s: float
    loss: float


@dataclass(frozen=True)
class Memory:
    """Of one process: bytes above what it held before it built the model, and all of them."""

    peak_bytes: int
    peak_resident_bytes: int


class TrainWorker:
    """Steps one after another, timed between a barrier and this rank's end of the step."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.num_steps = 0
        reset_peak_memory()
        self._base_bytes = memory_bytes("VmRSS")

    def prepare(self, step: int) -> Any:
        """The step's data, made before the clock starts."""
        raise NotImplementedError

    def train(self, data: Any) -> float:
        """Forward, backward, clip, update; this rank's part of the loss."""
        raise NotImplementedError

    def step(self) -> StepTime:
        """One training step."""
        data = self.prepare(self.num_steps)
        self.num_steps += 1
        if self.mesh.world.size > 1:
            dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        with record_function(STEP_RANGE):
            loss = self.train(data)
        ended, cpu_ended = time.perf_counter(), time.process_time()
        return StepTime(ended - began, cpu_ended - cpu_began, loss)

    def memory(self) -> Memory:
        """Peak resident memory of this process so far."""
        peak = memory_bytes("VmHWM")
        return Memory(peak - self._base_bytes, peak)

    def profile(self) -> Profile:
        """One step under the profiler."""
        waits: list[tuple[str, Mark, Mark]] = []
        self.mesh.ledger.waits = waits
        try:
            return profile_step(
                lambda: self.step().seconds,
                lambda: sum(seconds_between(began, ended) for _, began, ended in waits),
            )
        finally:
            self.mesh.ledger.waits = None


class MegaliteWorker(TrainWorker):
    """A rank of megalite at a layout, as the trainer runs it."""

    def __init__(self, mesh: Mesh, layout: Layout, micro_batch: int) -> None:
        super().__init__(mesh)
        self.micro_batch = micro_batch
        self.engine = Engine(config_of(layout, micro_batch), mesh)

    def prepare(self, step: int) -> list[TokenBatch]:
        return rank_batches(step, self.micro_batch, self.mesh.dp.rank, self.mesh.dp.size)

    def train(self, data: list[TokenBatch]) -> float:
        loss = self.engine.forward_backward(data)
        with record_function(OPTIMIZER_RANGE):
            self.engine.optimizer.step(OPTIMIZER.lr)
            # The next forward would hide this; a step that ends must have its weights.
            self.engine.optimizer.wait_params()
        return float(loss)


class TransformersWorker(TrainWorker):
    """LlamaForCausalLM with SDPA in a plain loop that accumulates over micro batches."""

    def __init__(self, mesh: Mesh, micro_batch: int) -> None:
        transformers = import_transformers()
        super().__init__(mesh)
        self.micro_batch = micro_batch
        torch.manual_seed(0)
        self.model = transformers.LlamaForCausalLM(llama_config(transformers)).train()
        self.optimizer = adamw(self.model)

    def prepare(self, step: int) -> list[tuple[Tensor, Tensor]]:
        return [
            (part[:, :-1].contiguous(), part[:, 1:].flatten())
            for part in torch.split(step_tokens(step), self.micro_batch)
        ]

    def train(self, data: list[tuple[Tensor, Tensor]]) -> float:
        total = torch.zeros(())
        for tokens, labels in data:
            logits = self.model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.view(-1, MODEL.vocab_size), labels, reduction="sum")
            torch.autograd.backward(loss / STEP_TOKENS)
            total += loss.detach()
            del logits, loss
        with record_function(OPTIMIZER_RANGE):
            assert OPTIMIZER.clip_grad is not None
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip_grad)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return float(total) / STEP_TOKENS


def llama_config(transformers: Any) -> Any:
    """transformers' config of the same model; nothing is downloaded."""
    return transformers.LlamaConfig(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.hidden_size,
        intermediate_size=MODEL.ffn_hidden_size,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.kv_heads,
        max_position_embeddings=SEQ_LENGTH,
        rms_norm_eps=MODEL.norm_eps,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Fused AdamW with the benchmark's settings: weight decay on matrices only."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    return torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=betas, eps=OPTIMIZER.eps, fused=True)


def import_transformers() -> Any:
    """transformers, kept from taking this repository's kernels/ for the package of that name."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _ROOT]
    spec = importlib.util.find_spec("kernels")
    if spec is not None and spec.origin and _ROOT in Path(spec.origin).resolve().parents:
        raise RuntimeError(
            f"`kernels` would be {spec.origin}, which transformers would import in place of the "
            f"PyPI package; take {_ROOT} out of PYTHONPATH"
        )
    return importlib.import_module("transformers")


def reset_peak_memory() -> None:
    """Let VmHWM start again from what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
