"""The whole model in one process against Llama written in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.model.kit.small import (
    SEQ_LENGTH,
    gradients,
    make_batch,
    make_stage,
    model_config,
    plain_logits,
    plain_loss,
    relative_error,
    weights,
)
from tests.tolerances import BFLOAT16_LOSS, PLAIN_FLOAT64


@pytest.mark.parametrize("cuts", [(), (3, 4, 13)], ids=["whole", "documents"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [0, 5])
def test_loss_and_every_gradient(chunk, tied, kv_heads, cuts) -> None:
    config = model_config(tie_embeddings=tied, num_kv_heads=kv_heads)
    model, batch = make_stage(config, loss_chunk_tokens=chunk), make_batch(cuts=cuts)
    plain = weights(model)
    want = plain_loss(config, plain, batch)
    want.backward()

    loss = model(None, batch)
    loss.backward()

    assert relative_error(loss, want) <= PLAIN_FLOAT64
    found = gradients(model)
    assert found.keys() == plain.keys()
    errors = {name: relative_error(found[name], plain[name].grad) for name in plain}
    assert all(error <= PLAIN_FLOAT64 for error in errors.values()), errors


@pytest.mark.parametrize("tied", [False, True])
def test_head_size_need_not_divide_the_hidden_size(tied) -> None:
    config = model_config(head_dim=6, num_heads=6, num_kv_heads=3, tie_embeddings=tied)
    model, batch = make_stage(config), make_batch()
    loss = model(None, batch)
    assert relative_error(loss, plain_loss(config, weights(model), batch)) <= PLAIN_FLOAT64


def test_gradients_of_microbatches_add_up() -> None:
    config = model_config()
    model, batch = make_stage(config), make_batch()
    for _ in range(2):
        model(None, batch).backward()
    once = make_stage(config)
    once(None, batch).backward()
    for name, grad in gradients(model).items():
        assert relative_error(grad, 2 * gradients(once)[name]) <= PLAIN_FLOAT64


@pytest.mark.parametrize("tied", [False, True])
def test_padded_rows_of_the_vocabulary_stay_out(tied) -> None:
    """29 true tokens in 32 rows: the rows begin at zero, get no gradient and do not matter."""
    config = model_config(tie_embeddings=tied)
    model, batch = make_stage(config), make_batch()
    rows = {s.name: p for p, s in model.named_params() if s.shape == (32, 16)}
    assert len(rows) == (1 if tied else 2)
    assert all(not param[29:].any() for param in rows.values())
    loss = model(None, batch)
    loss.backward()
    for name in rows:
        assert not gradients(model)[name][29:].any()
        assert gradients(model)[name][:29].any(1).sum() > 10
    with torch.no_grad():
        for param in rows.values():
            param[29:] = 1e3
    assert torch.equal(model(None, batch), loss)


def test_untrained_model_knows_nothing() -> None:
    config = model_config(vocab_size=97, init_std=0.02)
    loss = make_stage(config)(None, make_batch(vocab=97, num_sequences=8))
    assert abs(loss.item() - math.log(97)) < 0.05  # logits of some 0.1, averaged over 51 tokens


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("chunk", [0, 5])
def test_sixteen_bit_model_is_near_the_float32_one(chunk, recompute) -> None:
    config, batch = model_config(init_std=0.05), make_batch(cuts=(3,))
    fine = make_stage(config, dtype=torch.float32)
    coarse = make_stage(config, dtype=torch.bfloat16, loss_chunk_tokens=chunk, recompute=recompute)
    losses = [model(None, batch) for model in (fine, coarse)]
    assert losses[1].dtype == torch.float32
    assert abs((losses[1] - losses[0]).item()) <= BFLOAT16_LOSS
    for loss in losses:
        loss.backward()
    for name, grad in gradients(coarse).items():
        assert grad.dtype == torch.float32
        assert relative_error(grad, gradients(fine)[name]) < 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_logits_for_sampling_are_those_of_training(tied) -> None:
    config = model_config(tie_embeddings=tied)
    model, batch = make_stage(config), make_batch(num_sequences=1)
    logits = model.logits(batch.token_T)
    assert not logits.requires_grad
    assert logits.shape == (SEQ_LENGTH, 29)
    assert relative_error(logits, plain_logits(config, weights(model), batch)[:, :29]) < 1e-12
    loss = F.cross_entropy(logits, batch.label_T, reduction="none") @ batch.weight_T
    assert relative_error(loss, model(None, batch)) <= PLAIN_FLOAT64
    for length in range(1, SEQ_LENGTH):  # a prompt shorter than a sequence
        short = model.logits(batch.token_T[:length])
        assert relative_error(short, logits[:length]) <= PLAIN_FLOAT64


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_heard_as_often_as_its_spec_says(tied, chunk) -> None:
    model = make_stage(model_config(tie_embeddings=tied), loss_chunk_tokens=chunk)
    heard: list[torch.nn.Parameter] = []
    model.grads.listener = heard.append
    model(None, make_batch()).backward()
    for param, spec in model.named_params():
        assert sum(p is param for p in heard) == spec.contributions, spec.name
    assert len(heard) == sum(spec.contributions for _, spec in model.named_params())
    assert [s.contributions for _, s in model.named_params()].count(2) == int(tied)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_deferred_weight_gradients_have_the_same_bits(recompute, tied) -> None:
    config, batch = model_config(tie_embeddings=tied), make_batch(cuts=(5,))
    now, later = (make_stage(config, recompute=recompute) for _ in range(2))
    now(None, batch).backward()
    queue: list[Callable[[], None]] = []
    later.grads.deferred = queue
    later(None, batch).backward()
    later.grads.deferred = None
    assert not gradients(later)["layers.0.attention.qkv.weight"].any()
    assert len(queue) == 4 * config.num_layers + 2  # four matrices a layer, head and embedding
    for contribution in queue:
        contribution()
    for name, grad in gradients(now).items():
        if tied and name == "embedding.weight":  # two contributions, added in the other order
            assert relative_error(gradients(later)[name], grad) <= PLAIN_FLOAT64
        else:
            assert torch.equal(gradients(later)[name], grad), name


def test_frozen_parameters_get_no_gradient_and_change_no_other() -> None:
    config, batch = model_config(), make_batch()
    free, frozen = make_stage(config), make_stage(config)
    names = ("embedding.weight", "layers.0.attention_norm.weight", "layers.1.mlp.down.weight")
    for param, spec in frozen.named_params():
        param.requires_grad_(spec.name not in names)
    for model in (free, frozen):
        model(None, batch).backward()
    for name, grad in gradients(free).items():
        want = torch.zeros_like(grad) if name in names else grad
        assert torch.equal(gradients(frozen)[name], want), name


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True])
def test_no_parameter_is_read_before_its_section_is_announced(tied, recompute) -> None:
    """All weights are NaN until `before` of their section: the optimizer gathers them there."""
    config, batch = model_config(tie_embeddings=tied), make_batch()
    want = make_stage(config)(None, batch)
    model = make_stage(config, recompute=recompute)
    values = {p: p.detach().clone() for p, _ in model.named_params()}
    announced: list[int] = []

    def before(section: int) -> None:
        announced.append(section)
        with torch.no_grad():
            for param in model.sections()[section]:
                param.copy_(values[param])

    model.before_section = before
    with torch.no_grad():
        for param in values:
            param.fill_(torch.nan)
    loss = model(None, batch)
    loss.backward()
    assert announced == [0, 1, 2, 3]
    assert torch.equal(loss, want)
    flat = [param for section in model.sections() for param in section]
    assert {id(p) for p in flat} == {id(p) for p, _ in model.named_params()}
    assert all(grad.isfinite().all() for grad in gradients(model).values())
