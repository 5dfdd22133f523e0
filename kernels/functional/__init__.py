"""Every operation as a differentiable function: for models of your own, and for torch.compile.

Each goes through a custom operator `torch.ops.megalite.*`, which torch.compile keeps whole. On CUDA
they are Triton kernels, on CPU plain torch (see `dispatch.select`). Shapes: T tokens, D columns,
N query heads, K key/value heads, H head dim, V vocabulary; dims before D may be several. All raise
TypeError and ValueError for arguments that they do not take, the same on every device (`checks`);
strides may be any. Labels and positions outside their range raise ValueError on the CPU and give
NaN on CUDA, where reading them would wait for the device.
"""

from megalite.kernels.functional.attention import attention
from megalite.kernels.functional.loss import cross_entropy, linear_cross_entropy
from megalite.kernels.functional.moe import expert_rows, grouped_linear, permute, unpermute
from megalite.kernels.functional.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megalite.kernels.functional.optimizer import adamw_, sum_squares
from megalite.kernels.functional.pointwise import dropout, gelu, rope, scale_cast, swiglu
from megalite.kernels.plain.intervals import Intervals, document_intervals
from megalite.kernels.plain.moe import RowMap

__all__ = [
    "Intervals",
    "RowMap",
    "adamw_",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "document_intervals",
    "dropout",
    "expert_rows",
    "gelu",
    "grouped_linear",
    "layer_norm",
    "linear_cross_entropy",
    "permute",
    "rms_norm",
    "rope",
    "scale_cast",
    "sum_squares",
    "swiglu",
    "unpermute",
]
