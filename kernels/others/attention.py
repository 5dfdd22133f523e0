"""Attention by torch's flash and cuDNN kernels, or by FlashAttention 3 and 4, if installed.

Shapes: T tokens, N query heads, K key/value heads, H head dim. All are causal within documents,
differentiable by autograd, and without dropout of weights, since none of these kernels has a
dropout mask that depends on positions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.kernels.errors import BackendError
from megalite.kernels.others.probe import activate_flash, require_flash
from megalite.kernels.plain.attention import by_documents
from megalite.kernels.plain.dropout import AttentionDropout
from megalite.kernels.plain.intervals import check_documents
from megalite.kernels.upload import upload

_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
_CAPABILITIES = {"fa3": (9,), "fa4": (9, 10)}
NAMES = (*_BACKENDS, *_CAPABILITIES)


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
    if name == "sdpa_cudnn" and not torch.backends.cudnn.is_available():
        raise BackendError(
            f"kernels.attention=sdpa_cudnn: torch {torch.__version__} has no cuDNN here; install a "
            "CUDA build of torch on a machine with a GPU, or use kernels.attention=auto"
        )
    if name in _BACKENDS:
        return
    require_flash(name)
    major = torch.cuda.get_device_capability(device)[0]
    if major not in _CAPABILITIES[name]:
        needed = " or ".join(f"{number}.x" for number in _CAPABILITIES[name])
        raise BackendError(
            f"kernels.attention={name} needs a device of capability {needed}, this one has "
            f"{major}.x; use auto or sdpa_flash"
        )


def attention_adapter(
    name: str, device: torch.device
) -> tuple[Callable[..., object], Callable[..., Tensor]]:
    """`Kernels.attention_mask` and `attention` by one of `NAMES`.

    fa3 and fa4 replace torch's flash attention in the whole process. Raises BackendError as
    `require_attention`; masks and attention raise it for what they do not take.
    """
    require_attention(name, device)
    if name in _BACKENDS:
        return partial(sdpa_mask, name), partial(sdpa_attention, name)
    activate_flash(name)
    return packed_mask, partial(packed_attention, name)


def _refuse(name: str, drop: AttentionDropout | None) -> None:
    """Raise BackendError if there is dropout."""
    if drop is not None:
        raise BackendError(
            f"kernels.attention={name} drops no attention weights; set model.attention_dropout=0, "
            "or use auto"
        )


# --- torch's attention by one chosen kernel ------------------------------------------------------


def sdpa_mask(
    name: str, cu_seqlens: Sequence[int], window: int | None, device: torch.device
) -> Sequence[int]:
    """The boundaries of documents.

    There is no sliding window: one that is at least as long as every document has no effect and is
    allowed, others raise BackendError.
    """
    check_documents(cu_seqlens, window)
    longest = max((stop - start for start, stop in pairwise(cu_seqlens)), default=0)
    if window is not None and window < longest:
        raise BackendError(
            f"kernels.attention={name} has no sliding window; got one of {window} tokens in a "
            f"document of {longest}; use auto, fa3 or fa4"
        )
    return cu_seqlens


def sdpa_attention(
    name: str,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Sequence[int],
    drop: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """out[T, N, H]; documents of equal lengths go through one call, others through a call each."""
    _refuse(name, drop)
    try:
        with sdpa_kernel(_BACKENDS[name]):
            return by_documents(q_TNH, k_TKH, v_TKH, cu_seqlens, scale=scale)
    except RuntimeError as error:
        if "available kernel" not in str(error) and "viable backend" not in str(error):
            raise
        raise BackendError(
            f"kernels.attention={name}: torch's kernel does not take {q_TNH.dtype}, "
            f"{q_TNH.shape[1]} query heads and {k_TKH.shape[1]} key/value heads of "
            f"{q_TNH.shape[2]} on {q_TNH.device} ({error}); use auto"
        ) from error


# --- torch's attention over packed documents, by the package that is active ----------------------


class PackedMask(NamedTuple):
    """Boundaries on the device, tokens of the longest document, tokens seen back and ahead."""

    cu_seqlens: Tensor
    longest: int
    window: tuple[int, int]


def packed_mask(cu_seqlens: Sequence[int], window: int | None, device: torch.device) -> PackedMask:
    """Boundaries as int32 on the device: one transfer a microbatch, not one a layer."""
    check_documents(cu_seqlens, window)
    bounds = upload(torch.tensor(cu_seqlens, dtype=torch.int32), device)
    longest = max((stop - start for start, stop in pairwise(cu_seqlens)), default=0)
    # (tokens back, tokens ahead): -1 is any number, and a token's own place counts as 0 back
    return PackedMask(bounds, longest, (-1 if window is None else window - 1, 0))


def packed_attention(
    name: str,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    mask: PackedMask,
    drop: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """out[T, N, H], with documents and windows."""
    # Checked here, because the package's own errors do not name the setting.
    _refuse(name, drop)
    if q_TNH.dtype not in (torch.bfloat16, torch.float16):
        raise BackendError(
            f"kernels.attention={name} takes bfloat16 and float16, not {q_TNH.dtype}; "
            "change train.dtype, or use auto"
        )

    # Imported late: an older torch has no such module.
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    bounds, longest, window = mask
    grouped = q_TNH.shape[1] != k_TKH.shape[1]
    out: Tensor = varlen_attn(
        q_TNH, k_TKH, v_TKH, bounds, bounds, longest, longest, scale=scale, window_size=window,
        enable_gqa=grouped,
    )  # fmt: skip
    return out
