"""Initial weights: the same at every layout, of the intended size, one stream for each name."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config import DataConfig, ParallelConfig, RunConfig, TrainConfig
from megalite.layout.sharding import ShardSpec
from megalite.train.engine import build_chunks
from tests.model.kit.small import CPU, VARIANTS, model_config


def initial_weights(tp=1, pp=1, vpp=1, sp=False, seed=3, **model) -> dict[str, Tensor]:
    """Whole initial weights of a layout, put together from every rank's pieces."""
    config = RunConfig(
        model=model_config(num_kv_heads=4, num_layers=5, vocab_size=97, **model),
        parallel=ParallelConfig(tp=tp, pp=pp, vpp=vpp, dp=1, sequence_parallel=sp),
        data=DataConfig(seq_length=8),
        train=TrainConfig(steps=1, global_batch=1, micro_batch=1, seed=seed),
    )
    place = [stage % pp for stage in range(pp * vpp)]
    pieces: dict[tuple[str, bool], list[tuple[ShardSpec, Tensor]]] = {}
    for pp_rank in range(pp):
        for tp_rank in range(tp):
            axes = {
                "tp": SimpleNamespace(size=tp, rank=tp_rank),
                "pp": SimpleNamespace(size=pp, rank=pp_rank),
            }
            mesh: Any = SimpleNamespace(**axes, axis=axes.__getitem__, device=CPU)
            for chunk in build_chunks(config, mesh, torch.float32, place):
                for param, spec in chunk.named_params():
                    key = (spec.name, spec.counted)
                    pieces.setdefault(key, []).append((spec, param.detach()))
    found: dict[str, Tensor] = {}
    for (name, _), parts in pieces.items():
        assert len(parts) == tp
        spec, values = parts[0][0], [value for _, value in parts]
        if spec.cut_dim is None:
            assert all(torch.equal(value, values[0]) for value in values)
            whole = values[0]
        else:
            whole = torch.cat(values, spec.cut_dim)
        assert whole.shape == spec.shape
        assert torch.equal(found.setdefault(name, whole), whole)  # both tied copies
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 4, "sp": True},
        {"pp": 2},
        {"pp": 2, "vpp": 2},
        {"tp": 2, "sp": True, "pp": 2, "vpp": 2},
    ],
    ids=str,
)
def test_initial_weights_are_bitwise_those_of_one_process(layout, tied) -> None:
    got, want = initial_weights(tie_embeddings=tied, **layout), initial_weights(tie_embeddings=tied)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("variant", ["gpt2", "qwen2", "qwen3", "mixed"])
def test_initial_weights_of_families_are_those_of_one_process_too(variant) -> None:
    model = {k: v for k, v in VARIANTS[variant].items() if k != "num_kv_heads"}
    want = initial_weights(**model)
    got = initial_weights(tp=4, sp=True, pp=2, vpp=2, **model)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name
        if name.endswith(".bias"):
            assert not value.any(), name
        elif name.endswith("norm.weight"):
            assert (value == 1).all(), name
        else:
            assert value.any(), name


def test_standard_deviations() -> None:
    found = initial_weights(hidden_size=64, ffn_hidden_size=96, init_std=0.02)
    for name, value in found.items():
        if name.endswith("norm.weight"):
            assert (value == 1).all()
            continue
        values = value[:97] if value.shape[0] == 104 else value
        std = 0.02 / math.sqrt(2 * 5) if name.endswith(("out.weight", "down.weight")) else 0.02
        noise = std / math.sqrt(2 * values.numel())
        assert abs(float(values.std()) - std) < 5 * noise, name
        assert abs(float(values.mean())) < 5 * std / math.sqrt(values.numel()), name


def test_no_two_weights_and_no_two_seeds_share_a_draw() -> None:
    found, other = initial_weights(), initial_weights(seed=4)
    drawn = {n: v for n, v in found.items() if not n.endswith("norm.weight")}
    rows = torch.cat([v.reshape(-1, v.shape[-1])[:, :8].contiguous() for v in drawn.values()])
    rows = rows[rows.any(1)]
    assert len(rows.unique(dim=0)) == len(rows)
    for name, value in drawn.items():
        assert not torch.equal(value, other[name])
    again = initial_weights()
    assert all(torch.equal(value, again[name]) for name, value in found.items())
