"""megalite.kernels: one function per operation.

`select` returns the operations of a backend as one object, which model, loss and optimizer call.
The functions exported here are the reference path in plain torch. Importing this package never
imports triton.
"""

from megalite.kernels.dispatch import Backend, select
from megalite.kernels.errors import BackendError
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.activations import gelu, gelu_grad, swiglu, swiglu_grad
from megalite.kernels.plain.attention import attention, cached_attention
from megalite.kernels.plain.dropout import AttentionDropout, dropout, dropout_mask
from megalite.kernels.plain.loss import (
    cross_entropy_combine,
    cross_entropy_grad_,
    cross_entropy_stats,
)
from megalite.kernels.plain.moe import RowMap
from megalite.kernels.plain.norms import layer_norm, layer_norm_grad, rms_norm, rms_norm_grad
from megalite.kernels.plain.products import (
    accumulate_weight_grad_,
    bias_grad,
    embedding_grad_,
    linear,
    linear_input_grad,
)
from megalite.kernels.plain.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    rope_tables,
    rotate,
    rotate_grad_,
)

__all__ = [
    "AttentionDropout",
    "Backend",
    "BackendError",
    "Kernels",
    "LinearScaling",
    "Llama3Scaling",
    "RopeScaling",
    "RowMap",
    "YarnScaling",
    "accumulate_weight_grad_",
    "attention",
    "bias_grad",
    "cached_attention",
    "cross_entropy_combine",
    "cross_entropy_grad_",
    "cross_entropy_stats",
    "dropout",
    "dropout_mask",
    "embedding_grad_",
    "gelu",
    "gelu_grad",
    "layer_norm",
    "layer_norm_grad",
    "linear",
    "linear_input_grad",
    "rms_norm",
    "rms_norm_grad",
    "rope_tables",
    "rotate",
    "rotate_grad_",
    "select",
    "swiglu",
    "swiglu_grad",
]
