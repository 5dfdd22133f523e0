"""Every family, and every switch for itself, against the same model in plain torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megalite.model.dropout import DropoutAt
from tests.model.kit.small import (
    SEQ_LENGTH,
    VARIANTS,
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

AT = DropoutAt(seed=11, step=3, first_token=5 * SEQ_LENGTH)


def batch_at(at: DropoutAt | None = AT, **options):
    return dataclasses.replace(make_batch(**options), dropout=at)


@pytest.mark.parametrize("cuts", [(), (3, 4, 13)], ids=["whole", "documents"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_every_gradient(variant, cuts) -> None:
    config = model_config(**VARIANTS[variant])
    model, batch = make_stage(config), batch_at(cuts=cuts)
    plain = weights(model)
    want = plain_loss(config, plain, batch)
    want.backward()

    loss = model(None, batch)
    loss.backward()

    assert relative_error(loss, want) <= PLAIN_FLOAT64
    found = gradients(model)
    assert found.keys() == plain.keys()
    assert all(grad.any() for grad in found.values())
    errors = {name: relative_error(found[name], plain[name].grad) for name in plain}
    assert all(error <= PLAIN_FLOAT64 for error in errors.values()), errors


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_recompute_gives_the_same_bits(variant, recompute) -> None:
    config, batch = model_config(**VARIANTS[variant]), batch_at(cuts=(3, 4, 13))
    plain, other = (make_stage(config, recompute=r) for r in ("none", recompute))
    losses = [model(None, batch) for model in (plain, other)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for name, grad in gradients(plain).items():
        assert torch.equal(gradients(other)[name], grad), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sixteen_bit_model_is_near_the_float32_one(variant, dtype) -> None:
    config = model_config(**{**VARIANTS[variant], "init_std": 0.05})
    batch = batch_at(cuts=(3,))
    fine, coarse = (make_stage(config, dtype=d) for d in (torch.float32, dtype))
    losses = [model(None, batch) for model in (fine, coarse)]
    assert abs((losses[1] - losses[0]).item()) <= BFLOAT16_LOSS
    for loss in losses:
        loss.backward()
    want = gradients(fine)
    for name, grad in gradients(coarse).items():
        assert grad.dtype == torch.float32
        assert grad.isfinite().all(), name
        assert relative_error(grad, want[name]) < 0.1, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_and_logits_drop_nothing(variant) -> None:
    config = model_config(**VARIANTS[variant])
    model, batch = make_stage(config), batch_at(None, num_sequences=1)
    logits = plain_logits(config, weights(model), batch)[:, :29]
    assert relative_error(model.logits(batch.token_T), logits) < 1e-12
    for length in range(1, SEQ_LENGTH):
        short = model.logits(batch.token_T[:length])
        assert relative_error(short, logits[:length]) <= PLAIN_FLOAT64
    with torch.no_grad():
        loss = model(None, batch)
    assert relative_error(loss, plain_loss(config, weights(model), batch)) <= PLAIN_FLOAT64


def test_a_batch_to_train_on_must_say_where_it_stands() -> None:
    with pytest.raises(AssertionError, match="where it stands"):
        make_stage(model_config(**VARIANTS["gpt2"]))(None, batch_at(None))
    make_stage(model_config())(None, batch_at(None))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_heard_once_and_belongs_to_a_section(variant) -> None:
    model = make_stage(model_config(**VARIANTS[variant]))
    heard: list[torch.nn.Parameter] = []
    model.grads.listener = heard.append
    model(None, batch_at()).backward()
    for param, spec in model.named_params():
        assert sum(p is param for p in heard) == spec.contributions, spec.name
    named = {id(p) for p, _ in model.named_params()}
    assert named == {id(p) for p in model.parameters()}
    assert {id(p) for section in model.sections() for p in section} == named


def test_decay_is_for_matrices_only() -> None:
    for variant in VARIANTS.values():
        for param, spec in make_stage(model_config(**variant)).named_params():
            plain = spec.name.endswith(("norm.weight", ".bias"))
            assert spec.decay == (not plain), spec.name
            assert param.dim() > 1 or plain
