"""Checks that the kernels a config names can compute what it asks for. One line for each problem.

Conditions on the machine (a device, an installed package) are checked where the kernels are
selected, in train/kernel_choice.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config import RunConfig
from megalite.config.effect import effective_window


def kernel_problems(config: RunConfig) -> Iterator[str]:
    """One line for each choice of kernels that does not fit another setting."""
    kernels, model = config.kernels, config.model
    if kernels.backend in ("triton", "interpret") and config.train.dtype == "float64":
        yield (
            f"kernels.backend={kernels.backend} takes float32, bfloat16 and float16, but "
            "train.dtype=float64; use kernels.backend=reference or auto"
        )

    # With auto the backend's own attention computes, which takes every setting.
    if kernels.attention != "auto":
        if model.attention_dropout:
            yield (
                f"kernels.attention={kernels.attention} drops no attention weights, but "
                f"model.attention_dropout={model.attention_dropout:g}; set it to 0, or "
                "kernels.attention=auto"
            )
        if kernels.attention.startswith("sdpa") and effective_window(config) is not None:
            yield (
                f"kernels.attention={kernels.attention} knows no sliding window, but "
                f"model.sliding_window={model.sliding_window} cuts sequences of "
                f"data.seq_length={config.data.seq_length}; use fa3, fa4 or auto"
            )
        if config.train.dtype in ("float32", "float64") and kernels.attention != "sdpa_flash":
            yield (
                f"kernels.attention={kernels.attention} takes bfloat16 and float16, but "
                f"train.dtype={config.train.dtype}; use one of these, or kernels.attention=auto"
            )

    # apex has one kernel, for one combination of types.
    optimizer = config.optimizer
    if optimizer.adam == "apex":
        wide = config.train.dtype == "float64"
        if wide or optimizer.moment_dtype != "float32":
            got = "train.dtype=float64" if wide else "optimizer.moment_dtype=bfloat16"
            yield (
                f"optimizer.adam=apex updates float32 weights and moments, but {got}; change "
                "that, or use optimizer.adam=fused"
            )
