"""The operations as one object: model, loss and optimizer call it and choose no backend.

`Kernels()` is the reference path in plain torch, on any device; `triton.operations` gives the same
with the operations that have a Triton kernel, and `dispatch` replaces single ones by those of other
packages. All take and return the same as the function that is a field's default, which says what:
storage types in and out, float32 in between. Operations whose name ends in `_` write into their
first argument, and a gradient may be written over what its forward saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalite.kernels.adamw_operations import AdamWPlan
from megalite.kernels.errors import BackendError
from megalite.kernels.plain import (
    activations,
    adamw,
    loss,
    moe,
    norms,
    processor_products,
    products,
    rope,
)
from megalite.kernels.plain import attention as documents
from megalite.kernels.plain import dropout as masks
from megalite.kernels.plain import interval_attention as intervals

One = Callable[..., Tensor]
Two = Callable[..., tuple[Tensor, Tensor]]
Three = Callable[..., tuple[Tensor, Tensor, Tensor]]
InPlace = Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """Every operation, in plain torch unless replaced.

    uses_tables: True if a committed table gives the launch options of each kernel. head_dims and
    max_columns: the heads that attention takes, and the widest rows that norms take; None: any.
    """

    name: str = "reference"
    uses_tables: bool = False
    head_dims: tuple[int, ...] | None = None
    max_columns: int | None = None

    linear: One = processor_products.linear
    linear_input_grad: One = processor_products.linear_input_grad
    accumulate_weight_grad_: InPlace = processor_products.accumulate_weight_grad_
    bias_grad: One = products.bias_grad
    add_column_sums_: InPlace = products.add_column_sums_
    embedding_grad_: InPlace = products.embedding_grad_

    norm: Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor]] = norms.norm
    norm_grad: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = norms.norm_grad
    head_norm: Two = norms.head_norm
    head_norm_grad: Three = norms.head_norm_grad

    swiglu: One = activations.swiglu
    swiglu_grad: Callable[..., tuple[Tensor, Tensor | None]] = activations.swiglu_grad
    gelu: One = activations.gelu
    gelu_grad: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = activations.gelu_grad
    geglu: One = activations.geglu
    geglu_grad: Callable[..., tuple[Tensor, Tensor | None]] = activations.geglu_grad
    relu2: One = activations.relu2
    relu2_grad: Callable[..., tuple[Tensor, Tensor | None]] = activations.relu2_grad
    dropout: Callable[..., tuple[Tensor, Tensor | None]] = masks.dropout_rows
    rotate_heads: One = rope.rotate_heads
    rotate: Three = rope.rotate
    rotate_grad_: InPlace = rope.rotate_grad_

    attention_mask: Callable[..., Any] = documents.document_mask
    attention: One = documents.document_attention
    interval_attention: Two = intervals.interval_attention
    interval_attention_grad: Three = intervals.interval_attention_grad

    cross_entropy_stats: One = loss.cross_entropy_stats
    cross_entropy_combine: Two = loss.cross_entropy_combine
    cross_entropy_grad_: One = loss.cross_entropy_grad_

    expert_rows: Callable[..., moe.RowMap] = moe.expert_rows
    permute: One = moe.permute
    unpermute: One = moe.unpermute
    unpermute_grad: Two = moe.unpermute_grad
    grouped_linear: One = moe.grouped_linear
    grouped_linear_input_grad: One = moe.grouped_linear_input_grad
    grouped_weight_grad_: InPlace = moe.grouped_weight_grad_

    adamw_plan: Callable[..., AdamWPlan] = adamw.FusedAdamW
    square_sums: One = adamw.square_sums
    adamw_: InPlace = products.adamw_
    scale_cast: One = products.scale_cast

    def check_model(self, head_dim: int, hidden_size: int) -> None:
        """Raise BackendError for a model of a shape that the operations do not take."""
        if self.head_dims is not None and head_dim not in self.head_dims:
            raise BackendError(
                f"the triton attention has no kernel for a head dim of {head_dim}; it takes "
                f"{', '.join(map(str, self.head_dims))}; change the model, or set "
                "kernels.attention=sdpa_flash or kernels.backend=reference"
            )
        if self.max_columns is not None and hidden_size > self.max_columns:
            raise BackendError(
                f"the triton norms take up to {self.max_columns} columns, model.hidden_size "
                f"is {hidden_size}; change it, or set kernels.backend=reference"
            )
