"""Attention with interval masks in Triton against float64: forward, backward, chunks of a ring."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megalite.kernels.plain import attention as reference_attention
from megalite.kernels.plain import dropout as reference_dropout
from megalite.kernels.plain.intervals import Intervals, document_intervals
from megalite.kernels.triton.attention import attention_delta, attention_forward, merge_chunks
from megalite.kernels.triton.attention_backward import attention_backward
from megalite.kernels.triton.attention_tiles import AttentionTiles, Drop
from tests.kernels.triton.kit.inputs import (
    assert_near,
    assert_same_bits,
    draw,
    exact,
    far_rows,
)

SMALL = AttentionTiles(32, 32, 4, 1)


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    padding: int = 0
    tma: bool | None = None
    tiles: AttentionTiles | None = SMALL
    dkdv_tiles: AttentionTiles | None = SMALL
    splits: int | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding

    def mask(self) -> Intervals:
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        return document_intervals(ends, self.tokens, causal=self.causal, window=self.window)

    def seen(self) -> Tensor:
        """The mask written out, [T, T], from documents and distances alone."""
        document = torch.cat(
            [torch.full((n,), i) for i, n in enumerate(self.lengths)]
            + [torch.full((self.padding,), -1)]
        )
        token = torch.arange(self.tokens)
        distance = token[:, None] - token[None, :]
        seen = (document[:, None] == document[None, :]) & (document[:, None] >= 0)
        if self.causal:
            seen &= distance >= 0
        return seen if self.window is None else seen & (distance.abs() < self.window)


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse[N, T]) with the mask [T, S] written out; rows that see nothing give 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("tnh,snh->nts", q, k) * q.shape[2] ** -0.5
    s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(2)
    p = (s - lse.where(lse.isfinite(), 0.0)[..., None]).exp()
    return torch.einsum("nts,snh->tnh", p, v), lse


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and the gradient of the output."""
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, do = (
        draw(case.tokens, n, case.head_dim, dtype=dtype, seed=seed) for seed, n in enumerate(heads)
    )
    return q, k, v, do


CASES = {
    "documents, a window, groups of 4": Case((30, 1, 46), 4, 1, 16, window=20, padding=3),
    "one long document, full blocks": Case((129,), 2, 2, 32),
    "pointers, head dim 80": Case((33, 40), 2, 1, 80, tma=False),
    "both directions, window": Case((50, 27), 2, 2, 16, causal=False, window=9),
    "both directions": Case((50, 40), 2, 1, 16, causal=False),
    "window 1": Case((20, 17), 8, 1, 16, window=1),
    "window wider than all": Case((40,), 2, 1, 16, window=1000),
    "one token": Case((1,), 1, 1, 64),
    "one loop": Case((70,), 2, 1, 16, dkdv_tiles=AttentionTiles(32, 16, 4, 1, two_loops=False)),
    "pointers": Case((70,), 2, 1, 16, tma=False),
    "two programs a group": Case((30, 41), 8, 2, 16, window=25, padding=3, splits=2),
    "a program a query head": Case((70,), 6, 2, 16, splits=3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_and_its_gradients_in_float32(case: Case) -> None:
    check(case, torch.float32)


SHIPPED = {  # tiles as they are launched, 2.5 of them
    "groups of 2": Case((180, 110), 2, 1, 128, tiles=None, dkdv_tiles=None),
    "head dim 256": Case((150,), 1, 1, 256, tiles=None, dkdv_tiles=None),
    "groups of 4, split": Case((40,), 4, 1, 128, tiles=None, dkdv_tiles=None, splits=4),
    "head dim 256, split": Case((40,), 2, 1, 256, tiles=None, dkdv_tiles=None, splits=2),
    "head dim 96, window": Case((150, 40), 2, 2, 96, window=100, tiles=None, dkdv_tiles=None),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SHIPPED.values(), ids=SHIPPED.keys())
def test_attention_and_its_gradients_in_16_bits(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def check(case: Case, dtype: torch.dtype) -> None:
    q, k, v, do = inputs(case, dtype)
    mask, seen = case.mask(), case.seen()
    o, lse = attention_forward(q, k, v, mask, tiles=case.tiles, tma=case.tma)
    q64, k64, v64 = exact(q), exact(k), exact(v)
    want_o, want_lse = plain(q64, k64, v64, seen)
    assert_near(o, want_o)
    visible = seen.any(1)
    assert (lse[:, ~visible] == -torch.inf).all()
    assert (o[~visible] == 0).all()
    assert_near(lse[:, visible], want_lse[:, visible])

    stats = attention_delta(o, do, lse)
    assert_near(stats[1], (o.double() * do.double()).sum(2).t())
    grads = attention_backward(
        do,
        q,
        k,
        v,
        stats,
        mask,
        dq_tiles=case.tiles,
        dkdv_tiles=case.dkdv_tiles,
        tma=case.tma,
        splits=case.splits,
    )
    (want_o * do.double()).sum().backward()
    for got, leaf in zip(grads, (q64, k64, v64), strict=True):
        assert leaf.grad is not None
        if float(leaf.grad.norm()) < 1e-9:  # one token: its own softmax is constant
            assert float(got.norm()) < 1e-5
        else:
            assert_near(got, leaf.grad, backward=True)


def test_a_ring_of_three_chunks_is_the_whole() -> None:
    case = Case((31, 46, 19), 4, 2, 16, window=40)
    q, k, v, do = inputs(case, torch.float32)
    mask = case.mask()
    size = case.tokens // 3
    spans = [slice(i * size, (i + 1) * size) for i in range(3)]
    q64, k64, v64 = exact(q), exact(k), exact(v)
    want_o, want_lse = plain(q64, k64, v64, case.seen())
    (want_o * do.double()).sum().backward()
    assert q64.grad is not None

    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for a in spans:
        pieces = [mask.chunk(a.start, size, b.start, size) for b in spans]
        parts = [
            attention_forward(q[a], k[b], v[b], piece, tiles=SMALL)
            for b, piece in zip(spans, pieces, strict=True)
        ]
        o, lse = merge_chunks(parts)
        assert_near(o, want_o[a])
        assert_near(lse, want_lse[:, a])
        stats = attention_delta(o, do[a], lse)
        dq = torch.zeros_like(q[a])
        for b, piece in zip(spans, pieces, strict=True):
            grads = attention_backward(
                do[a], q[a], k[b], v[b], stats, piece, dq_tiles=SMALL, dkdv_tiles=SMALL
            )
            for total, part in zip((dq, dk[b], dv[b]), grads, strict=True):
                total += part
        assert_near(dq, q64.grad[a], backward=True)
    assert_near(dk, k64.grad, backward=True)
    assert_near(dv, v64.grad, backward=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropped_weights_are_those_of_the_reference(dtype: torch.dtype) -> None:
    case = Case((20, 33), 4, 2, 16, window=25)
    q, k, v, do = inputs(case, dtype)
    first, key, p = 2**32 - 10, (7, 2**32 - 3), 0.3
    q64, k64, v64 = exact(q), exact(k), exact(v)
    at = reference_dropout.AttentionDropout(p, key, first, 5)
    want = reference_attention.attention(q64, k64, v64, [0, 20, 53], 25, at)
    (want * do.double()).sum().backward()
    drop = Drop(p, key, first, first, 5)
    for tma in (False, True) if dtype == torch.float32 else (True,):
        o, lse = attention_forward(q, k, v, case.mask(), tiles=SMALL, drop=drop, tma=tma)
        assert_near(o, want)
        stats = attention_delta(o, do, lse)
        grads = attention_backward(
            do,
            q,
            k,
            v,
            stats,
            case.mask(),
            drop=drop,
            tma=tma,
            dq_tiles=SMALL,
            dkdv_tiles=SMALL,
        )
        for got, leaf in zip(grads, (q64, k64, v64), strict=True):
            assert_near(got, leaf.grad, backward=True)


def test_views_and_memory_without_alignment_give_the_same_result() -> None:
    case = Case((40,), 2, 1, 16)
    q, k, v, do = inputs(case, torch.float32)
    want = attention_forward(q, k, v, case.mask(), tiles=SMALL)
    packed = torch.full((40, 7, 16), torch.nan)
    packed[:, 0:2], packed[:, 3:4], packed[:, 5:6] = q, k, v
    views = (packed[:, 0:2], packed[:, 3:4], packed[:, 5:6])
    head_major = q.transpose(0, 1).contiguous().transpose(0, 1)
    unaligned = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    for triple in (views, (head_major, k, v), (unaligned, k, v)):
        found = attention_forward(*triple, case.mask(), tiles=SMALL)
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])
    o, lse = want
    expanded = torch.ones(()).expand(o.shape)
    arguments = (attention_delta(o, expanded, lse), case.mask())
    got = attention_backward(expanded, *views, *arguments, dq_tiles=SMALL, dkdv_tiles=SMALL)
    dense = expanded.contiguous()
    same = attention_backward(dense, q, k, v, *arguments, dq_tiles=SMALL, dkdv_tiles=SMALL)
    assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))
    assert do.shape == o.shape


@pytest.mark.parametrize("tma", [False, True])
def test_rows_beyond_two_to_the_31_elements(tma: bool) -> None:
    case = Case((3,), 1, 1, 16, tma=tma)
    near = inputs(case, torch.bfloat16)
    far = [far_rows(x.view(3, 16)).as_strided((3, 1, 16), (1 << 30, 16, 1)) for x in near]
    results = []
    for q, k, v, do in (near, far):
        o, lse = attention_forward(q, k, v, case.mask(), tiles=SMALL, tma=tma)
        stats = attention_delta(o, do, lse)
        grads = attention_backward(
            do, q, k, v, stats, case.mask(), tma=tma, dq_tiles=SMALL, dkdv_tiles=SMALL
        )
        results.append([o, lse, stats, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("tma", [False, True])
def test_bits_do_not_depend_on_the_run(tma: bool) -> None:
    case = Case((30, 21), 2, 1, 16)
    q, k, v, do = inputs(case, torch.float32)

    def run() -> list[Tensor | None]:
        o, lse = attention_forward(q, k, v, case.mask(), tiles=SMALL, tma=tma)
        grads = attention_backward(
            do,
            q,
            k,
            v,
            attention_delta(o, do, lse),
            case.mask(),
            dq_tiles=SMALL,
            dkdv_tiles=SMALL,
            tma=tma,
        )
        return [o, lse, *grads]

    assert_same_bits(run)


def test_no_queries_and_no_keys() -> None:
    none = torch.empty(0, 2, 16)
    some = draw(3, 2, 16)
    empty = torch.zeros(0, dtype=torch.int32)
    unseen = torch.zeros(3, dtype=torch.int32)
    o, lse = attention_forward(some, none, none, Intervals(unseen, unseen, empty, empty))
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    nobody = Intervals(empty, empty, unseen, unseen)
    o, lse = attention_forward(none, some, some, nobody)
    assert o.shape == (0, 2, 16)
    _, dk, dv = attention_backward(o, none, some, some, attention_delta(o, o, lse), nobody)
    assert (dk == 0).all()
    assert (dv == 0).all()


def test_errors_name_what_is_wrong() -> None:
    case = Case((5,), 4, 2, 16)
    q, k, v, _ = inputs(case, torch.float32)
    with pytest.raises(ValueError, match=r"head_dim 24 is not supported.*backend=reference"):
        attention_forward(draw(5, 4, 24), draw(5, 2, 24), draw(5, 2, 24), case.mask())
    with pytest.raises(ValueError, match="4 query heads do not divide over 3 kv heads"):
        attention_forward(q, draw(5, 3, 16), draw(5, 3, 16), case.mask())
    with pytest.raises(ValueError, match=r"types must be the same: q has torch\.float32"):
        attention_forward(q, k.bfloat16(), v, case.mask())
    o, lse = attention_forward(q, k, v, case.mask(), tiles=SMALL)
    stats = attention_delta(o, q, lse)
    with pytest.raises(ValueError, match="splits=3, expected a divisor of 2"):
        attention_backward(q, q, k, v, stats, case.mask(), splits=3)
    with pytest.raises(ValueError, match="scale=0, expected a positive"):
        attention_forward(q, k, v, case.mask(), scale=0)
    with pytest.raises(ValueError, match="window=0, expected at least 1"):
        document_intervals(torch.tensor([0, 5]), 5, window=0)
