"""The members that the pipeline uses of a model chunk, and the tensors that pass between chunks.

A *stage* is one of the pp * vpp parts of the model, numbered in model order; a *chunk* is the
object that computes a stage, on the pipeline rank `schedule.place[stage]`. Chunks are protocols:
any object with these members will do. Makes no model and moves no tensor.

Shapes: t tokens on this rank, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class WeightGradients(Protocol):
    """A chunk's store of weight gradients."""

    deferred: list[Callable[[], None]] | None  # a list: queue them instead of computing them


class PipelineChunk(Protocol):
    """One model chunk of this pipeline rank."""

    @property
    def grads(self) -> WeightGradients:
        """The store of weight gradients; used only when a schedule splits the backward."""
        ...

    def forward(self, input_tD: Tensor | None, micro_batch: Any) -> Tensor:
        """The output [t, D] for the next stage, from the previous stage's output.

        The first stage gets None as its input; the last one returns this microbatch's share of the
        step's loss, a scalar divided by the global token count.
        """
        ...


@dataclass(frozen=True)
class BoundarySpec:
    """Shape and dtype of the tensors between stages, the same for every stage and microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}".replace("torch.", "")
