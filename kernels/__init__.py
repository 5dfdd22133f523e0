"""megalite.kernels: one function per operation.

Callers in the model, loss and optimizer use only the functions exported here. Importing this
package never imports triton.
"""

from megalite.kernels.reference import (
    accumulate_weight_grad_,
    attention,
    cross_entropy_combine,
    cross_entropy_grad_,
    cross_entropy_stats,
    embedding_grad_,
    linear,
    linear_input_grad,
    rms_norm,
    rms_norm_grad,
    rope_tables,
    rotate,
    rotate_grad_,
    swiglu,
    swiglu_grad,
)

__all__ = [
    "accumulate_weight_grad_",
    "attention",
    "cross_entropy_combine",
    "cross_entropy_grad_",
    "cross_entropy_stats",
    "embedding_grad_",
    "linear",
    "linear_input_grad",
    "rms_norm",
    "rms_norm_grad",
    "rope_tables",
    "rotate",
    "rotate_grad_",
    "swiglu",
    "swiglu_grad",
]
