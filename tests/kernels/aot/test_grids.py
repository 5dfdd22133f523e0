"""How evenly the attention kernels fill a GPU: their grids, scheduled on 132 multiprocessors.

Programs start in the order of their numbers, the first index fastest, and each multiprocessor takes
the next one when it is free. A program's load is the number of blocks that its loop visits under a
causal mask. What is possible: no device is done before its mean load, nor before its longest
program where the query heads of a group are divided as far as they go.
"""

from __future__ import annotations

import heapq
import json
from itertools import product
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from megalite.config.load import load_config
from megalite.config.shipped import shipped_configs
from megalite.kernels.arguments import cdiv
from megalite.kernels.plain.intervals import document_intervals
from megalite.kernels.triton import attention_backward as backward
from megalite.kernels.triton.attention import attention_delta, attention_forward
from megalite.kernels.triton.attention_tiles import HEAD_DIMS
from tests.kernels.aot.test_static import REGISTERS, SHARED_LIMIT, committed

MULTIPROCESSORS = 132
FLOOR = 0.9
UNSET_BY_MODELS = ["data.seq_length=2048", "train.steps=1", "train.global_batch=8"]
Grid = tuple[str, int, int, dict[str, Any]]


def shapes() -> list[tuple[int, int, int, int]]:
    """(tokens, query heads, key/value heads, head dim) of a rank, of every shipped model."""
    found = set()
    for shipped in shipped_configs().values():
        if shipped.kind != "hardware":
            model = load_config(shipped.path, UNSET_BY_MODELS).config.model
            learned = model.positions == "learned"
            lengths = (model.max_positions,) if learned else (2048, 8192, 32768)
            for tokens, tp in product(lengths, (1, 2, 4, 8)):
                if model.kv_heads % tp == 0 and model.head_size in HEAD_DIMS:
                    heads = (model.num_heads // tp, model.kv_heads // tp)
                    found.add((tokens, *heads, model.head_size))
    return sorted(found)


def grids(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int]) -> list[Grid]:
    """(kernel, first index, second index, options) of attention's launches on 132 processors."""
    tokens, heads, kv_heads, head_dim = shape
    seen: list[Grid] = []

    def run(kernel: JITFunction, *arguments: Any, grid: Any, **options: Any) -> None:
        name = kernel.fn.__name__.strip("_")
        if name in ("forward_kernel", "dq_kernel", "dkdv_kernel"):
            seen.append((name, grid[0], grid[1], options))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(backward, "num_programs", lambda device: MULTIPROCESSORS)
    q = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16)
    k = torch.empty(tokens, kv_heads, head_dim, dtype=torch.bfloat16)
    mask = document_intervals(torch.tensor([0, tokens]), tokens)
    o, lse = attention_forward(q, k, k, mask)
    backward.attention_backward(q, q, k, k, attention_delta(o, q, lse), mask)
    return seen


def loads(grid: Grid, tokens: int, splits: int) -> list[int]:
    """Blocks that the loop of each program visits, in the order in which programs start."""
    name, first, second, use = grid
    rows, columns = use["BM"], use["BN"]
    if name == "dkdv_kernel":
        heads = use["GROUP"] // splits
        visits = [cdiv(tokens - y * columns, rows) * heads for y in range(second)]
        first = first // use["SPLITS"] * splits
    else:
        visits = [cdiv(min(tokens, (second - y) * rows), columns) for y in range(second)]
    return [n for n in visits for _ in range(first)]


def efficiency(work: list[int]) -> float:
    """Mean load of a multiprocessor over the load of the last one to finish."""
    free = [0] * MULTIPROCESSORS
    for load in work:
        heapq.heapreplace(free, free[0] + load)
    return sum(work) / MULTIPROCESSORS / max(free)


def possible(work: list[int]) -> float:
    """The efficiency that no order of these programs exceeds."""
    mean = sum(work) / MULTIPROCESSORS
    return mean / max(mean, *work)


@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_attention_fills_132_multiprocessors(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = grids(monkeypatch, shape)
    assert {name for name, *_ in found} == {"forward_kernel", "dq_kernel", "dkdv_kernel"}
    for grid in found:
        name, _, _, use = grid
        finest = loads(grid, shape[0], use.get("GROUP", 1))
        got = efficiency(loads(grid, shape[0], use.get("SPLITS", 1)))
        assert got >= FLOOR * possible(finest), (name, got, possible(finest))


def test_a_multiprocessor_holds_one_program_of_attention() -> None:
    """The number of splits counts on it."""
    rows = [x for x in committed() if x["case"] in ("attention 64", "attention 128")]
    for row in rows:
        if row["kernel"] != "delta_kernel":
            registers = 2 * 32 * row["warps"] * row["registers"]
            assert registers > REGISTERS or 2 * row["shared_bytes"] > SHARED_LIMIT, json.dumps(row)


@pytest.mark.parametrize(
    ("key_blocks", "kv_heads", "group", "splits"),
    [(64, 8, 4, 1), (64, 4, 4, 2), (64, 2, 4, 4), (64, 1, 4, 4), (64, 1, 7, 7), (16, 2, 6, 6),
     (8, 12, 1, 1), (512, 1, 4, 1), (64, 5, 4, 2)],
)  # fmt: skip
def test_a_group_is_divided_where_the_device_would_stand_empty(
    key_blocks: int, kv_heads: int, group: int, splits: int
) -> None:
    assert backward.dkdv_splits(key_blocks, kv_heads, group, MULTIPROCESSORS) == splits
