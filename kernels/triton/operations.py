"""The operations on Triton kernels; dense products are torch's, without the processor's own.

Only `dispatch` imports this module, since it imports triton.
"""

from __future__ import annotations

from megalite.kernels.operations import Kernels
from megalite.kernels.plain import products
from megalite.kernels.triton import (
    adamw,
    adamw_plan,
    attention,
    attention_backward,
    cast,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    grouped_gemm,
    moe_permute,
    norm,
    rope,
    swiglu,
)
from megalite.kernels.triton.attention_tiles import HEAD_DIMS

TRITON = Kernels(
    name="triton",
    uses_tables=True,
    head_dims=HEAD_DIMS,
    max_columns=norm.MAX_COLUMNS,
    linear=products.linear,
    linear_input_grad=products.linear_input_grad,
    accumulate_weight_grad_=products.accumulate_weight_grad_,
    embedding_grad_=embedding.embedding_grad_,
    add_column_sums_=norm.add_column_sums_,
    norm=norm.norm,
    norm_grad=norm.norm_grad,
    head_norm=norm.head_norm,
    head_norm_grad=norm.head_norm_grad,
    swiglu=swiglu.swiglu,
    swiglu_grad=swiglu.swiglu_grad,
    gelu=gelu.gelu,
    gelu_grad=gelu.gelu_grad,
    geglu=swiglu.geglu,
    geglu_grad=swiglu.geglu_grad,
    relu2=gelu.relu2,
    relu2_grad=gelu.relu2_grad,
    dropout=dropout.dropout,
    rotate_heads=rope.rotate_heads,
    rotate=rope.rotate,
    rotate_grad_=rope.rotate_grad_,
    attention_mask=attention_backward.document_mask,
    attention=attention_backward.document_attention,
    interval_attention=attention.attention_forward,
    interval_attention_grad=attention_backward.attention_grad,
    cross_entropy_stats=cross_entropy.cross_entropy_stats,
    cross_entropy_combine=cross_entropy.cross_entropy_combine,
    cross_entropy_grad_=cross_entropy.cross_entropy_grad_,
    expert_rows=moe_permute.expert_rows,
    permute=moe_permute.permute,
    unpermute=moe_permute.unpermute,
    unpermute_grad=moe_permute.unpermute_grad,
    grouped_linear=grouped_gemm.grouped_linear,
    grouped_linear_input_grad=grouped_gemm.grouped_linear_input_grad,
    grouped_weight_grad_=grouped_gemm.grouped_weight_grad_,
    adamw_plan=adamw_plan.OnePassAdamW,
    square_sums=adamw_plan.square_sums,
    adamw_=adamw.adamw_,
    scale_cast=cast.scale_cast,
)
