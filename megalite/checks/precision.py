"""Checks that number formats and optimizer options fit each other. One line for each problem.

Single values are checked in config/schema.py; options that need parameter names are checked where
those are known, when the optimizer is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config import OptimizerConfig, RunConfig

# A bf16 moment keeps 8 bits. With round-to-nearest, m * beta is m again once 1 - beta is below
# 2^-9 to 2^-8: the moment never fades. 1 - beta >= 2^-7 is at least one unit in the last place.
_MAX_BF16_BETA = 1 - 2**-7

# The smallest normal number of float32, in which norms and updates are computed unless all is
# float64: less may come to 0, and 0 / 0 is what an eps is to prevent.
_MIN_EPS = 2.0**-126


def precision_problems(config: RunConfig) -> Iterator[str]:
    """One line for each setting that does not fit another one."""
    optimizer = config.optimizer
    if config.train.dtype == "float16" and optimizer.loss_scale_min > optimizer.loss_scale:
        yield (
            f"optimizer.loss_scale_min={optimizer.loss_scale_min:g} is above "
            f"optimizer.loss_scale={optimizer.loss_scale:g}; use at most {optimizer.loss_scale:g}"
        )
    for name, eps in (("optimizer.eps", optimizer.eps), ("model.norm_eps", config.model.norm_eps)):
        if eps < _MIN_EPS and config.train.dtype != "float64":
            yield f"{name}={eps:g} is 0 in float32; use 1.2e-38 or more, such as 1e-8"
    if optimizer.moment_dtype == "bfloat16":
        yield from _bf16_moments(optimizer)
    if config.eval.weights == "ema" and config.optimizer.ema_decay is None:
        yield (
            "eval.weights=ema needs an average of the weights, but optimizer.ema_decay is not "
            "set; set it to for example 0.999, or eval.weights=model"
        )
    if optimizer.name != "muon":
        for index, group in enumerate(optimizer.groups):
            if group.algorithm is not None:
                yield (
                    f"optimizer.groups[{index}].algorithm={group.algorithm} has no effect: "
                    f"optimizer.name={optimizer.name} has one algorithm; remove it or set "
                    "optimizer.name=muon"
                )


def _bf16_moments(optimizer: OptimizerConfig) -> Iterator[str]:
    for name in ("beta1", "beta2"):
        beta = getattr(optimizer, name)
        if beta > _MAX_BF16_BETA:
            yield (
                f"optimizer.{name}={beta:g} changes a moment by less than bfloat16 can say in a "
                f"step; use at most {_MAX_BF16_BETA:g}, or optimizer.moment_dtype=float32"
            )
    if optimizer.name == "muon" and optimizer.muon_momentum > _MAX_BF16_BETA:
        yield (
            f"optimizer.muon_momentum={optimizer.muon_momentum:g} changes a moment by less than "
            f"bfloat16 can say in a step; use at most {_MAX_BF16_BETA:g}, or "
            "optimizer.moment_dtype=float32"
        )
