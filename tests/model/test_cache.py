"""Texts read and continued with kept keys and values, beside whole contexts without any."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.model.cache import Cache
from megalite.model.init import init_params
from megalite.model.transformer import Transformer
from megalite.run.parameters import whole_model
from megalite.tensor_parallel.context import LayerContext
from tests.model.kit.small import (
    CPU,
    SEQ_LENGTH,
    VARIANTS,
    make_stage,
    model_config,
    relative_error,
)
from tests.pool import RankContext, RankPool
from tests.tolerances import FLOAT32, PLAIN_FLOAT64

TEXTS = [[3, 1, 4, 1], [5], [9, 2, 6, 5, 3]]
MORE = [[8, 9, 7], [9, 3, 2], [3, 8, 4]]
TOLERANCE = {torch.float64: PLAIN_FLOAT64, torch.float32: FLOAT32}


def continued(model: Transformer) -> list[Tensor]:
    """Logits after the texts, and after each of the tokens that follow; the second text ends."""
    cache = Cache(len(TEXTS), SEQ_LENGTH)
    flat = torch.tensor([token for text in TEXTS for token in text])
    found = [model.text_logits(flat, [len(text) for text in TEXTS], cache)]
    kept = [0, 1, 2]
    for number in range(len(MORE[0])):
        if number == 2:
            cache.keep([0, 2])
            kept = [0, 2]
        token_B = torch.tensor([MORE[text][number] for text in kept])
        found.append(model.text_logits(token_B, [1] * len(kept), cache))
    return found


def whole(model: Transformer) -> list[Tensor]:
    """The same by the definition: each text alone, over all its tokens."""
    found = []
    for number in range(len(MORE[0]) + 1):
        kept = [0, 1, 2] if number < 3 else [0, 2]
        texts = [torch.tensor(TEXTS[text] + MORE[text][:number]) for text in kept]
        found.append(torch.stack([model.logits(text)[-1] for text in texts]))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kept_keys_and_values_give_the_logits_of_whole_contexts(variant, dtype) -> None:
    """Texts of several lengths side by side, beyond a window of 3, after one of them has ended."""
    model = make_stage(model_config(**VARIANTS[variant]), dtype=dtype)
    for got, want in zip(continued(model), whole(model), strict=True):
        assert relative_error(got, want) <= TOLERANCE[dtype]


def test_a_window_keeps_no_more_than_its_tokens() -> None:
    model = make_stage(model_config(**VARIANTS["mistral"]))
    cache = Cache(1, SEQ_LENGTH)
    model.text_logits(torch.arange(5), [5], cache)
    assert {tuple(part.shape) for kept in cache._layers.values() for part in kept} == {(1, 2, 3, 4)}


def test_logits_of_chosen_tokens_are_rows_of_the_texts() -> None:
    model = make_stage(model_config())
    flat = torch.tensor([token for text in TEXTS for token in text])
    rows = torch.tensor([1, 4, 8, 9])
    got = model.text_logits(flat, [len(text) for text in TEXTS], rows=rows)
    want = torch.cat([model.logits(torch.tensor(text)) for text in TEXTS])[rows]
    assert relative_error(got, want) <= PLAIN_FLOAT64


def continued_on_two_ranks(ctx: RankContext, variant: str) -> list[Tensor]:
    mesh, config = ctx.mesh(tp=2), model_config(**VARIANTS[variant])
    context = LayerContext(mesh.tp, torch.float64, CPU)
    model = Transformer(config, context, whole_model(config), seq_length=SEQ_LENGTH)
    init_params(model.named_params(), 5, mesh.axis)
    return continued(model)


@pytest.mark.parametrize("variant", ["llama", "mistral", "mixed"])
def test_every_tensor_parallel_rank_has_the_logits_of_one_process(variant, pool: RankPool) -> None:
    mesh, config = Mesh(Topology()), model_config(**VARIANTS[variant])
    context = LayerContext(mesh.tp, torch.float64, CPU)
    model = Transformer(config, context, whole_model(config), seq_length=SEQ_LENGTH)
    init_params(model.named_params(), 5, mesh.axis)
    want = whole(model)
    first, second = pool.run(continued_on_two_ranks, 2, variant)
    for one, other, alone in zip(first, second, want, strict=True):
        assert torch.equal(one, other)
        assert relative_error(one, alone) <= PLAIN_FLOAT64
