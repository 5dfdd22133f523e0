"""Folders that transformers wrote, or a person by hand: the same logits from the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megalite.errors import CheckpointError
from megalite.exchange.classes import CLASSES, StockClass
from megalite.exchange.folder import open_folder
from megalite.generate.generate import load_model
from tests.exchange.kit import (
    LLAMA3,
    MODELS,
    VOCAB,
    edit,
    rewrite,
    save,
    stock,
    stock_logits,
    tokens,
    whole,
)
from tests.tolerances import EXCHANGE_FLOAT32


@torch.no_grad()
def our_logits(folder: Path, **options: Any) -> Tensor:
    model, config = load_model(open_folder(folder, **options))
    assert config.model.vocab_pad_multiple == 1
    return model.logits(tokens())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_stock_classs(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save(stock(MODELS[name]), tmp_path / "a", dtype)
    ours = our_logits(folder)
    theirs = stock_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert (ours - theirs).abs().max() <= EXCHANGE_FLOAT32 * theirs.abs().max()


@pytest.mark.parametrize("row", CLASSES, ids=lambda row: row.name)
def test_keys_left_out_mean_what_the_class_takes(row: StockClass) -> None:
    """A file without keys, and the one that transformers writes of its own defaults."""
    theirs = AutoConfig.for_model(row.model_type)
    (bare, no_keys), (full, all_keys) = row.settings({}), row.settings(theirs.to_dict())
    assert (no_keys.problems, all_keys.problems) == ([], [])
    differ = {name for name in full if full[name] != bare[name]} - {"head_dim", "num_kv_heads"}
    assert differ == set()
    assert bare["head_dim"] in (None, full["head_dim"])
    assert bare["num_kv_heads"] in (None, full["num_kv_heads"])


@pytest.mark.parametrize("typed", ["type", "rope_type"])
def test_the_older_dialect(typed: str, tmp_path: Path) -> None:
    model = stock(MODELS["llama3"])
    folder = save(model, tmp_path / "a")
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    scaling[typed] = scaling.pop("rope_type")
    edit(folder, rope_parameters=None, rope_theta=40.0, rope_scaling=scaling, torch_dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(stock_logits(theirs), stock_logits(model))
    assert (our_logits(folder) - stock_logits(model)).abs().max() <= EXCHANGE_FLOAT32


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rope_scaling": {"rope_type": "default"}},
            "the older keys beside it have {'rope_type': ",
        ),
        ({"rope_theta": 50.0}, "the older keys beside it have {'rope_theta': 50.0}"),
    ],
)
def test_two_dialects_that_differ(changes: Any, problem: str, tmp_path: Path) -> None:
    folder = save(stock(MODELS["llama3"]), tmp_path / "a")
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match="rope_parameters = ") as caught:
        open_folder(folder)
    assert problem in str(caught.value)


def test_a_base_model_without_its_prefix(tmp_path: Path) -> None:
    """GPT-2 as it was published: no `transformer.`, no head, the causal masks among the tensors."""
    model = stock(MODELS["gpt2"])
    folder = save(model, tmp_path / "a")
    tensors = {name.removeprefix("transformer."): t for name, t in whole(folder).items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(4)}
    rewrite(folder, tensors | masks | {"h.0.attn.masked_bias": torch.tensor(-1e4)})
    assert (our_logits(folder) - stock_logits(model)).abs().max() <= EXCHANGE_FLOAT32


def test_tables_of_rotation_are_passed_over(tmp_path: Path) -> None:
    model = stock(MODELS["llama"])
    folder = save(model, tmp_path / "a")
    rates = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(6) for i in range(4)}
    rewrite(folder, whole(folder) | rates)
    assert (our_logits(folder) - stock_logits(model)).abs().max() <= EXCHANGE_FLOAT32


def test_a_tied_head_that_is_there_must_be_equal(tmp_path: Path) -> None:
    model = stock(MODELS["qwen2"])
    folder = save(model, tmp_path / "a")
    tensors = whole(folder)
    head = tensors["model.embed_tokens.weight"].clone()
    rewrite(folder, {**tensors, "lm_head.weight": head})
    assert (our_logits(folder) - stock_logits(model)).abs().max() <= EXCHANGE_FLOAT32
    head[7, 7] += 1
    rewrite(folder, {**tensors, "lm_head.weight": head})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        open_folder(folder)
    ignored = our_logits(folder, ignore=frozenset({"lm_head.weight"}))
    assert (ignored - stock_logits(model)).abs().max() <= EXCHANGE_FLOAT32


@pytest.mark.parametrize("kind", ["tokenizer_config.json", "added_tokens.json", "tokenizer.json"])
def test_tokens_beyond_the_vocabulary_grow_it(kind: str, tmp_path: Path) -> None:
    """New rows are the mean: a new token's logit is the mean of the others'."""
    model = stock(MODELS["llama"])
    folder = save(model, tmp_path / "a")
    added: dict[str, Any] = {
        "tokenizer_config.json": {"added_tokens_decoder": {"62": {"content": "<x>"}, "4": {}}},
        "added_tokens.json": {"<x>": 62},
        "tokenizer.json": {"added_tokens": [{"id": 62, "content": "<x>"}]},
    }
    edit(folder, kind, **added[kind])
    (note,) = open_folder(folder).notes
    assert note.startswith(f"the tokenizer has 63 tokens, config.json vocab_size={VOCAB}: ")
    ours, theirs = our_logits(folder), stock_logits(model)
    assert ours.shape == (24, 63)
    assert (ours[:, :VOCAB] - theirs).abs().max() <= EXCHANGE_FLOAT32
    assert (ours[:, VOCAB:] - theirs.mean(1, keepdim=True)).abs().max() <= EXCHANGE_FLOAT32
