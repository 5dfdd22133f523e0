"""What the pipeline runtime asks of a model chunk, and of the tensors between chunks.

Protocols only: any object with these members will do. Makes no model and moves no tensor.

Shapes: t tokens on this rank, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class WeightGradients(Protocol):
    """Where a chunk's weight gradients go."""

    deferred: list[Callable[[], None]] | None  # a list: queue them instead of computing them


class Stage(Protocol):
    """One model chunk of this pipeline rank."""

    @property
    def grads(self) -> WeightGradients:
        """Its store of weight gradients; used only when a schedule splits the backward."""
        ...

    def forward(self, input_tD: Tensor | None, micro_batch: Any) -> Tensor:
        """Boundary tensor in and out. The first stage gets None as its input; the last one returns
        this microbatch's share of the step's loss, a scalar divided by the global token count.
        """
        ...


@dataclass(frozen=True)
class Boundary:
    """The tensor that passes between stages: the same for every stage and microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}".replace("torch.", "")
