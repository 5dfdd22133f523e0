"""Attention by torch's flash and cuDNN kernels, or by FlashAttention 3 and 4, if installed.

Shapes: T tokens, N query heads, K key/value heads, H head dim. All are causal within documents,
differentiable by autograd, and without dropout of weights, since none of these kernels has a
dropout mask that depends on positions alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.kernels.arguments import check_shape
from megalite.kernels.errors import BackendError
from megalite.kernels.others.probe import activate_flash, probe
from megalite.kernels.plain.dropout import AttentionDropout
from megalite.kernels.plain.intervals import check_documents

_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
_CAPABILITIES = {"fa3": (9,), "fa4": (9, 10)}
NAMES = (*_BACKENDS, *_CAPABILITIES)


class AttentionAdapter(ABC):
    """`AttentionOperations` of another package, and a call that makes the mask and uses it."""

    def __init__(self, name: str) -> None:
        self._name = name

    @abstractmethod
    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> Any:
        """The mask for `attention`, the same one for all layers of a microbatch."""

    @abstractmethod
    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: Any,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        """out[T, N, H]. Raises BackendError for tensors or dropout that it does not take."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        cu_seqlens: Sequence[int],
        window: int | None = None,
    ) -> Tensor:
        """out[T, N, H] for document boundaries [0, ..., T]."""
        mask = self.attention_mask(cu_seqlens, window, q_TNH.device)
        return self.attention(q_TNH, k_TKH, v_TKH, mask)

    def _refuse(self, drop: AttentionDropout | None) -> None:
        """Raise BackendError if there is dropout."""
        if drop is not None:
            raise BackendError(
                f"kernels.attention={self._name} drops no attention weights; set "
                "model.attention_dropout=0, or use auto"
            )


def require_attention(name: str, device: torch.device) -> None:
    """Raise BackendError, with what to install or to change, if an adapter cannot work on a device.

    Does not activate the adapter.
    """
    if name not in NAMES:
        allowed = ", ".join(("auto", *NAMES))
        raise BackendError(f"kernels.attention is {name!r}; allowed: {allowed}")
    if name != "sdpa_flash" and device.type != "cuda":
        raise BackendError(
            f"kernels.attention={name} needs a CUDA device, this one is {device.type}; use auto or "
            "sdpa_flash"
        )
    probe(name)
    if name in _BACKENDS:
        return
    major = torch.cuda.get_device_capability(device)[0]
    if major not in _CAPABILITIES[name]:
        needed = " or ".join(f"{number}.x" for number in _CAPABILITIES[name])
        raise BackendError(
            f"kernels.attention={name} needs a device of capability {needed}, this one has "
            f"{major}.x; use auto or sdpa_flash"
        )


def attention_adapter(name: str, device: torch.device) -> AttentionAdapter:
    """The adapter of one of `NAMES` on a device. Raises BackendError as `require_attention`.

    fa3 and fa4 replace torch's flash attention in the whole process.
    """
    require_attention(name, device)
    if name in _BACKENDS:
        return SdpaAttention(name)
    activate_flash(name)
    return PackedAttention(name)


@dataclass(frozen=True)
class _Lengths:
    """The mask of `SdpaAttention`: the number of tokens of each document."""

    lengths: tuple[int, ...]


class SdpaAttention(AttentionAdapter):
    """torch's attention by one chosen kernel.

    Documents of equal lengths go through one call together, others through a call each. There is no
    sliding window: one that is at least as long as every document has no effect and is allowed,
    others raise BackendError.
    """

    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> Any:
        """Raises BackendError for a window within a document."""
        check_documents(cu_seqlens, window)
        lengths = tuple(stop - start for start, stop in pairwise(cu_seqlens) if stop > start)
        if window is not None and window < max(lengths, default=0):
            raise BackendError(
                f"kernels.attention={self._name} has no sliding window; got one of {window} tokens "
                f"in a document of {max(lengths)}; use auto, fa3 or fa4"
            )
        return _Lengths(lengths)

    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: Any,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        self._refuse(drop)
        lengths = mask.lengths
        check_shape("attention", (sum(lengths), *q_TNH.shape[1:]), q=q_TNH)
        if not lengths:
            return q_TNH.clone()
        if len(set(lengths)) == 1:
            return self._documents(q_TNH, k_TKH, v_TKH, lengths[0])
        parts = (x.split(list(lengths)) for x in (q_TNH, k_TKH, v_TKH))
        return torch.cat([self._documents(q, k, v, len(q)) for q, k, v in zip(*parts, strict=True)])

    def _documents(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, length: int) -> Tensor:
        """Attention of documents of one length, side by side."""
        heads = (x.unflatten(0, (-1, length)) for x in (q_TNH, k_TKH, v_TKH))
        q, k, v = (x.transpose(1, 2) for x in heads)
        try:
            with sdpa_kernel(_BACKENDS[self._name]):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
                )
        except RuntimeError as error:
            if "available kernel" not in str(error) and "viable backend" not in str(error):
                raise
            raise BackendError(
                f"kernels.attention={self._name}: torch's kernel does not take {q.dtype}, "
                f"{q.shape[1]} query heads and {k.shape[1]} key/value heads of {q.shape[3]} on "
                f"{q.device} ({error}); use auto"
            ) from error
        return out.transpose(1, 2).reshape(q_TNH.shape)


@dataclass(frozen=True)
class _Packed:
    """The mask of `PackedAttention`: boundaries on the device, longest document, window."""

    cu_seqlens: Tensor
    longest: int
    window: tuple[int, int]


class PackedAttention(AttentionAdapter):
    """torch's attention over packed documents, by the package that `activate_flash` activated."""

    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> Any:
        """Boundaries as int32 on the device: one transfer a microbatch, not one a layer."""
        check_documents(cu_seqlens, window)
        bounds = torch.tensor(cu_seqlens, dtype=torch.int32).to(device, non_blocking=True)
        longest = max((stop - start for start, stop in pairwise(cu_seqlens)), default=0)
        # (tokens back, tokens ahead): -1 is any number, and a token's own place counts as 0 back
        return _Packed(bounds, longest, (-1 if window is None else window - 1, 0))

    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: Any,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        # Checked here, because the package's own errors do not name the setting.
        self._refuse(drop)
        if q_TNH.dtype not in (torch.bfloat16, torch.float16):
            raise BackendError(
                f"kernels.attention={self._name} takes bfloat16 and float16, not {q_TNH.dtype}; "
                "change train.dtype, or use auto"
            )

        # Imported late: an older torch has no such module.
        out: Tensor = import_module("torch.nn.attention.varlen").varlen_attn(
            q_TNH,
            k_TKH,
            v_TKH,
            mask.cu_seqlens,
            mask.cu_seqlens,
            mask.longest,
            mask.longest,
            window_size=mask.window,
            enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
        )
        return out
