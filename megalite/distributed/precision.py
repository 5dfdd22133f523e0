"""Number formats: the torch type behind each setting, and the types in which sums are kept.

Defined here alone, below everything that computes, so that no two parts can differ. Computes
nothing itself.
"""

from __future__ import annotations

import torch

from megalite.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

_TF32_CAPABILITY = 8  # compute capability of the first GPUs with TF32 (Ampere)


def main_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of gradients, masters and averages: fp64 for fp64 parameters, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def set_tf32(enabled: bool, device: torch.device) -> None:
    """Let fp32 products use TF32 or forbid it, whatever torch's or the image's default is.

    Raises ConfigError where TF32 is requested and the device has none.
    """
    if enabled and not _has_tf32(device):
        raise ConfigError(
            f"train.tf32=true has no effect on {device.type}: TF32 exists on GPUs of compute "
            f"capability {_TF32_CAPABILITY} and above; remove it"
        )
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = enabled
        torch.backends.cudnn.allow_tf32 = enabled


def _has_tf32(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= _TF32_CAPABILITY
