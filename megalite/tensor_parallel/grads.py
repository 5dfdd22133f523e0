"""The store of weight gradients, one per model chunk.

Parameters' gradients never pass through autograd's `.grad`: the backward of each layer passes the
store a function that adds its contribution straight into the main-gradient buffer (float32 under
bfloat16 weights). That makes three things one mechanism: accumulation over microbatches without a
second buffer, weight gradients deferred to a later action of the pipeline schedule, and the moment
at which a gradient bucket is complete. Does not reduce anything over ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.distributed.precision import main_grad_dtype

Accumulate = Callable[[Tensor], object]


class GradStore:
    """Main-gradient buffers of one chunk's parameters, and the queue of deferred contributions.

    `deferred`: None, or a list that collects deferrable contributions instead of running them.
    `listener`: called with the parameter after each contribution is in its buffer.
    """

    def __init__(self) -> None:
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self.deferred: list[Callable[[], None]] | None = None
        self.listener: Callable[[nn.Parameter], None] | None = None

    def bind(self, param: nn.Parameter, buffer: Tensor) -> None:
        """Let contributions to `param` go into `buffer` (same shape, main-gradient dtype)."""
        assert buffer.shape == param.shape, (buffer.shape, param.shape)
        assert buffer.is_contiguous(), "layers add into flattened views of the buffer"
        self._buffers[param] = buffer

    def buffer(self, param: nn.Parameter) -> Tensor:
        """The main gradient of `param`; zeros made on first use where nothing was bound."""
        buffer = self._buffers.get(param)
        if buffer is None:
            dtype = main_grad_dtype(param.dtype)
            buffer = torch.zeros(param.shape, dtype=dtype, device=param.device)
            self._buffers[param] = buffer
        return buffer

    def add(self, param: nn.Parameter, accumulate: Accumulate, *, deferrable: bool = False) -> None:
        """Run `accumulate(buffer)` now, or queue it when deferring and the caller allows it.

        Matrix products and the embedding's rows are deferrable; gradients that a kernel computes
        together with the input gradient are not. A queued function must hold detached tensors only.
        """
        if not param.requires_grad:
            return
        if deferrable and self.deferred is not None:
            self.deferred.append(lambda: self._accumulate(param, accumulate))
        else:
            self._accumulate(param, accumulate)

    def _accumulate(self, param: nn.Parameter, accumulate: Accumulate) -> None:
        if torch.is_grad_enabled():  # deferred to a place outside of a backward
            with torch.no_grad():
                accumulate(self.buffer(param))
        else:
            accumulate(self.buffer(param))
        if self.listener is not None:
            self.listener(param)
