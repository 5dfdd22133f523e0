"""Raw collectives over one mesh axis, each counted in the ledger. Not differentiable.

Every operation takes an `Axis`; with axis size 1 it moves nothing and returns the same thing. Those
that start one return a `Handle` whose `wait()` gives the result; until then neither input nor
output may be touched. Non-contiguous tensors are copied in and, where the result belongs in them,
copied back, so no result is ever left in a temporary. All members must call with equal shapes.

On gloo, reduce-scatter and small all-reduces and all-gathers go through one all-to-all and a sum in
axis order: on two to four ranks reduce-scatter and all-reduce took a half to two thirds of the
time of gloo's own, and the bits are the same on every run and every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.mesh import Axis, Mesh

ReduceOp = Literal["sum", "max"]

# torch 2.13 renamed these and warns at each call of the old name.
_RENAMED = hasattr(dist, "all_gather_single")
_gather_tensor: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _RENAMED else "all_gather_into_tensor"
)
_scatter_tensor: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor"
)

# Largest all-reduce on gloo, in bytes over all ranks, that is done by exchange: above it, sending
# everything to everyone costs more than a ring's extra hops.
_EXCHANGE_BYTES = 512 * 1024


class Handle:
    """An operation in flight. `wait()` finishes it and returns its result, at every call."""

    def __init__(
        self,
        result: Tensor,
        work: Any = None,
        axis: Axis | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._result = result
        self._work = work
        self._axis = axis
        self._finish = finish
        self._op = None if axis is None else axis.ledger.last_op
        if axis is not None and axis.backend == "nccl" and self._op is not None:
            # Not the work itself: it keeps the output alive, and asking it asks CUDA.
            axis.ledger.follow(self._op, work.get_future_result().done)

    def done(self) -> bool:
        """True if `wait()` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> Tensor:
        """The result, once it is complete. Errors carry this rank's place and the operation."""
        if self._work is not None:
            assert self._axis is not None, "only operations on an axis have work"
            work, self._work = self._work, None
            with self._axis.ledger.blocked(self._axis.name, self._op):
                work.wait()
                if self._finish is not None:
                    self._finish()
            self._finish = None
        return self._result


def all_reduce(x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Tensor:
    """Sum or maximum of `x` over the axis, in place in `x` (also when not contiguous): any shape.

    A maximum may lose a NaN. Raises ValueError for another `op`.
    """
    return start_all_reduce(x, axis, op).wait()


def start_all_reduce(x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Handle:
    """Start an `all_reduce`."""
    reduce_op = _reduce_op(op)
    if axis.size == 1 or x.numel() == 0:
        return Handle(x)
    axis.ledger.start("all_reduce", axis.name, 2 * _ring_bytes(x, axis))
    with axis.ledger.blocked(axis.name, starting=True):
        if axis.backend == "gloo" and axis.size * x.nbytes <= _EXCHANGE_BYTES:
            return _reduce_by_exchange(x, axis, op)
        flat = x if x.is_contiguous() else x.contiguous()
        work = dist.all_reduce(flat, op=reduce_op, group=axis.group, async_op=True)
        return Handle(x, work, axis, None if flat is x else lambda: _store(x, flat))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """The ranks' `x` concatenated on dim 0 in axis order: [t, ...] -> [size * t, ...].

    With size 1 the result is `x` itself.
    """
    return start_all_gather(x, axis).wait()


def start_all_gather(x: Tensor, axis: Axis) -> Handle:
    """Start an `all_gather`."""
    if axis.size == 1:
        return Handle(x)
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    return _gather(out, x.contiguous(), axis) if x.numel() else Handle(out)


def start_all_gather_into(flat: Tensor, axis: Axis) -> Handle:
    """Start an all-gather in place: my slice of dim 0 is sent, the other slices are filled."""
    _require_contiguous(flat, "all_gather_into")
    mine = local_slice(flat, axis)
    if axis.size == 1 or flat.numel() == 0:
        return Handle(flat)
    return _gather(flat, mine, axis)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """My slice of dim 0 of the sum of `x` over the axis: [T, ...] -> [T / size, ...]; `x` is kept.

    With size 1 the result is `x` itself. Raises ValueError if the size does not divide T.
    """
    return start_reduce_scatter(x, axis).wait()


def start_reduce_scatter(x: Tensor, axis: Axis) -> Handle:
    """Start a `reduce_scatter`."""
    if axis.size == 1:
        return Handle(x)
    out = torch.empty_like(local_slice(x, axis), memory_format=_ROWS)
    return _scatter(out, x.contiguous(), axis) if x.numel() else Handle(out)


def start_reduce_scatter_into(flat: Tensor, axis: Axis) -> Handle:
    """Start a reduce-scatter in place; the result is my slice of `flat`, which holds the sum.

    What the other slices hold afterwards is not defined. Raises ValueError if the size does not
    divide dim 0.
    """
    _require_contiguous(flat, "reduce_scatter_into")
    mine = local_slice(flat, axis)
    if axis.size == 1 or flat.numel() == 0:
        return Handle(mine)
    return _scatter(mine, flat, axis)


def all_to_all(
    x: Tensor, axis: Axis, send_sizes: Sequence[int], receive_sizes: Sequence[int]
) -> Tensor:
    """Send unequal pieces of 1-D `x` to the ranks of the axis; returns what they sent here.

    `x` holds `send_sizes[r]` elements for axis rank r, one piece after the other. The result, of
    sum(receive_sizes) elements, holds `receive_sizes[r]` elements from rank r, in axis order. With
    size 1 it is `x` itself.
    """
    if axis.size == 1:
        return x
    sent_away = sum(send_sizes) - send_sizes[axis.rank]
    axis.ledger.start("all_to_all", axis.name, sent_away * x.element_size())
    out = x.new_empty(sum(receive_sizes))
    with axis.ledger.blocked(axis.name, starting=True):
        work = dist.all_to_all_single(
            out, x, list(receive_sizes), list(send_sizes), group=axis.group, async_op=True
        )
    return Handle(out, work, axis).wait()


def broadcast(x: Tensor, axis: Axis, src: int = 0) -> Tensor:
    """`x` of axis rank `src`, in place in every rank's `x`; same shape and dtype everywhere."""
    if axis.size == 1 or x.numel() == 0:
        return x
    axis.ledger.start("broadcast", axis.name, _ring_bytes(x, axis))
    with axis.ledger.blocked(axis.name, starting=True):
        flat = x.contiguous()
        work = dist.broadcast(flat, src=axis.ranks[src], group=axis.group, async_op=True)
    return Handle(x, work, axis, lambda: _store(x, flat)).wait()


def barrier(axis: Axis) -> None:
    """Return once every rank of the axis has called it."""
    if axis.size == 1:
        return
    token = torch.zeros(1, device=axis.device)
    axis.ledger.start("barrier", axis.name, 2 * _ring_bytes(token, axis))
    with axis.ledger.blocked(axis.name, starting=True):
        work = dist.all_reduce(token, group=axis.group, async_op=True)
    Handle(token, work, axis, lambda: token.item()).wait()  # on CUDA the host, too, waits


def broadcast_object(value: Any, axis: Axis, src: int = 0) -> Any:
    """Axis rank `src`'s `value` on every rank: anything JSON can hold; tuples become lists."""
    if axis.size == 1:
        return json.loads(json.dumps(value))
    data = _encode(value, axis) if axis.rank == src else torch.empty(0, dtype=torch.uint8)
    length = broadcast(torch.tensor([data.numel()], device=axis.device), axis, src)
    if axis.rank != src:
        data = torch.empty(int(length), dtype=torch.uint8, device=axis.device)
    return _decode(broadcast(data, axis, src))


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """Every rank's `value` in axis order: anything JSON can hold; tuples become lists."""
    padded, lengths = _padded(value, axis)
    rows = all_gather(padded, axis).view(axis.size, -1)
    return [_decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def gather_object(value: Any, axis: Axis) -> list[Any]:
    """Every rank's `value` in axis order on axis rank 0, an empty list elsewhere; as JSON."""
    if axis.size == 1:
        return [json.loads(json.dumps(value))]
    padded, lengths = _padded(value, axis)
    rows = [torch.empty_like(padded) for _ in lengths] if axis.rank == 0 else None
    axis.ledger.start("gather", axis.name, padded.nbytes)
    with axis.ledger.blocked(axis.name, starting=True):
        work = dist.gather(padded, rows, group=axis.group, group_dst=0, async_op=True)
    Handle(padded, work, axis).wait()
    if rows is None:
        return []
    return [_decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def isend(x: Tensor, mesh: Mesh, src_pp: int, dst_pp: int) -> Handle:
    """Start sending `x` over the channel from this stage `src_pp`; the handle keeps it alive."""
    peer = mesh.channel_peer(src_pp, dst_pp)
    channel = mesh.channel(src_pp, dst_pp)
    mesh.ledger.start("send", mesh.pp.name, x.nbytes, (mesh.rank, peer))
    flat = x.contiguous()
    with mesh.ledger.blocked(mesh.pp.name, starting=True):
        work = channel.send([flat], _in_pair(mesh, peer), 0)
    return Handle(flat, work, mesh.pp)


def irecv(x: Tensor, mesh: Mesh, src_pp: int, dst_pp: int) -> Handle:
    """Start receiving into `x` over the channel to this stage `dst_pp`; wait() gives `x`.

    Shape and dtype must be those of the matching send: gloo fills a part of a larger `x` silently.
    """
    peer = mesh.channel_peer(src_pp, dst_pp)
    channel = mesh.channel(src_pp, dst_pp)
    mesh.ledger.start("recv", mesh.pp.name, 0.0, (peer, mesh.rank))
    flat = x if x.is_contiguous() else torch.empty_like(x, memory_format=_ROWS)
    with mesh.ledger.blocked(mesh.pp.name, starting=True):
        work = channel.recv([flat], _in_pair(mesh, peer), 0)
    return Handle(x, work, mesh.pp, None if flat is x else lambda: _store(x, flat))


def _in_pair(mesh: Mesh, peer: int) -> int:
    """The peer's rank in a channel's group, where the two stand in the order of world ranks."""
    return int(peer > mesh.rank)


def local_slice(x: Tensor, axis: Axis) -> Tensor:
    """This rank's equal part of dim 0 of `x`, a view; ValueError if the size does not divide it."""
    length = x.shape[0]
    if length % axis.size != 0:
        raise ValueError(
            f"dim 0 of {tuple(x.shape)} cannot be cut into {axis.size} equal parts over the "
            f"{axis.name} axis; its length must be a multiple of {axis.size}"
        )
    part = length // axis.size
    return x[axis.rank * part : (axis.rank + 1) * part]


_ROWS = torch.contiguous_format


def _gather(out: Tensor, mine: Tensor, axis: Axis) -> Handle:
    axis.ledger.start("all_gather", axis.name, _ring_bytes(out, axis))
    with axis.ledger.blocked(axis.name, starting=True):
        if axis.backend == "gloo" and axis.size > 2 and out.nbytes <= _EXCHANGE_BYTES:
            sent = mine.reshape(-1).repeat(axis.size)
            work = dist.all_to_all_single(out.view(-1), sent, group=axis.group, async_op=True)
        else:
            work = _gather_tensor(out, mine, group=axis.group, async_op=True)
    return Handle(out, work, axis)


def _scatter(out: Tensor, x: Tensor, axis: Axis) -> Handle:
    axis.ledger.start("reduce_scatter", axis.name, _ring_bytes(x, axis))
    with axis.ledger.blocked(axis.name, starting=True):
        if axis.backend != "gloo":
            work = _scatter_tensor(out, x, group=axis.group, async_op=True)
            return Handle(out, work, axis)
        parts = torch.empty_like(x)
        work = dist.all_to_all_single(parts, x, group=axis.group, async_op=True)
    return Handle(out, work, axis, lambda: _combine(parts.chunk(axis.size), out, "sum"))


def _reduce_by_exchange(x: Tensor, axis: Axis, op: ReduceOp) -> Handle:
    flat = x.reshape(-1)
    parts = flat.new_empty(axis.size * flat.numel())
    work = dist.all_to_all_single(parts, flat.repeat(axis.size), group=axis.group, async_op=True)

    def finish() -> None:
        _combine([part.view(x.shape) for part in parts.chunk(axis.size)], x, op)

    return Handle(x, work, axis, finish)


def _combine(parts: list[Tensor] | tuple[Tensor, ...], out: Tensor, op: ReduceOp) -> None:
    """Sum or maximum of at least two parts in axis order: every rank gets the same bits."""
    combine = torch.add if op == "sum" else torch.maximum
    with torch.no_grad():
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)


def _reduce_op(op: ReduceOp) -> Any:
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    if op not in ops:
        raise ValueError(f"op={op!r}; allowed are 'sum' and 'max'")
    return ops[op]


def _store(x: Tensor, flat: Tensor) -> None:
    if flat is not x:
        with torch.no_grad():
            x.copy_(flat)


def _ring_bytes(x: Tensor, axis: Axis) -> float:
    """Bytes that a ring moves from each rank for all of `x`: (n - 1) / n of them."""
    return (axis.size - 1) / axis.size * x.nbytes


def _require_contiguous(flat: Tensor, op: str) -> None:
    if not flat.is_contiguous():
        raise ValueError(
            f"{op} works in place on a contiguous tensor, got shape {tuple(flat.shape)} with "
            f"strides {flat.stride()}"
        )


def _padded(value: Any, axis: Axis) -> tuple[Tensor, list[int]]:
    """A value's bytes, as many as the longest of the axis has, and the lengths of all."""
    data = _encode(value, axis)
    lengths = all_gather(torch.tensor([data.numel()], device=axis.device), axis).tolist()
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    return padded, lengths


def _encode(value: Any, axis: Axis) -> Tensor:
    data = bytearray(json.dumps(value).encode())
    return torch.frombuffer(data, dtype=torch.uint8).to(axis.device)


def _decode(data: Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())
