"""In, trained at another layout, and out again: bit for bit, and step for step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megalite.checkpoint.find import find_checkpoint
from megalite.corpus.indexed_writer import IndexedWriter
from megalite.exchange.export import export
from megalite.exchange.folder import open_folder, read_folder
from tests.exchange.kit import MODELS, VOCAB, save, stock, whole
from tests.pool import RankPool
from tests.tolerances import EXCHANGE_FLOAT32
from tests.train.kit.runs import GLOBAL_BATCH, SEQ_LENGTH, losses, make_config, train

LR, STEPS = 1e-3, 5


def write_data(folder: Path) -> torch.Tensor:
    """One step's samples, so that each step is an epoch; the tokens."""
    ids = np.random.default_rng(5).integers(0, VOCAB, GLOBAL_BATCH * SEQ_LENGTH + 1)
    with IndexedWriter(folder / "data", VOCAB) as writer:
        writer.add_document(ids)
        writer.publish()
    return torch.from_numpy(ids)


def config(folder: Path, name: str, stock_folder: Path, layout: str, **changes: Any) -> Any:
    model = read_folder(stock_folder).config.model.model_dump()
    changes = {f"model__{key}": value for key, value in model.items()} | changes
    dropouts = {key: 0.0 for key in changes if key.endswith("_dropout")}
    return make_config(
        folder, name, layout,
        **{**changes, **dropouts, "model__vocab_pad_multiple": 4},
        checkpoint__load_weights=f"hf:{stock_folder}",
        optimizer__lr=LR, optimizer__lr_schedule="constant", optimizer__warmup_steps=0,
        optimizer__weight_decay=0.0, optimizer__clip_grad=None,
    )  # fmt: skip


def stock_losses(folder: Path, ids: torch.Tensor) -> list[float]:
    """The losses of the stock class, trained on the same samples by torch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.95), 1e-8, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        logits = model(ids[:-1].view(GLOBAL_BATCH, SEQ_LENGTH)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[1:])
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_out_as_it_came_in_and_trained_as_the_stock_class(
    name: str, pool: RankPool, tmp_path: Path
) -> None:
    """At tp 2 x pp 2 x dp 2 with ZeRO-1; a bf16 folder through fp32 masters."""
    ids = write_data(tmp_path)
    wide = save(stock(MODELS[name]), tmp_path / "wide")
    half = save(stock(MODELS[name]), tmp_path / "half", torch.bfloat16)
    jobs = [
        config(tmp_path, "still", wide, "3d", train__steps=0),
        config(tmp_path, "low", half, "3d", train__steps=0, train__dtype="bfloat16"),
        config(tmp_path, "on", wide, "3d", train__steps=STEPS),
    ]
    outcomes = pool.run(train, 8, [(job, None) for job in jobs])
    assert {(one.code, one.error) for rank in outcomes for one in rank} == {(0, "")}

    for run, dtype, source in (("still", None, wide), ("low", "bfloat16", half)):
        lines = export(find_checkpoint(tmp_path / run), tmp_path / f"{run}-out", dtype=dtype)
        assert lines[0].startswith(f"wrote {tmp_path / run}-out: ")
        before, after = whole(source), whole(tmp_path / f"{run}-out")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert {t.dtype for t in after.values()} == {before.popitem()[1].dtype}

    theirs = stock_losses(wide, ids)
    for ours, wanted in zip(losses(tmp_path / "on"), theirs, strict=True):
        assert abs(ours - wanted) <= EXCHANGE_FLOAT32 * wanted
    assert theirs[-1] < theirs[0] - 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_written_from_a_folder_is_the_same(name: str, tmp_path: Path) -> None:
    """Every key of the config comes back from transformers, too, and every tensor's bits."""
    source = save(stock(MODELS[name]), tmp_path / "a")
    export(open_folder(source), tmp_path / "b", max_file_bytes=20_000)
    before, after = whole(source), whole(tmp_path / "b")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 2

    one = AutoModelForCausalLM.from_pretrained(source)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    kept, found = one.config.to_dict(), other.config.to_dict()
    unlike = {key for key in kept if found.get(key) != kept[key]} - {"_name_or_path"}
    assert unlike - {"transformers_version"} == set()
    assert one.generation_config.to_dict() == other.generation_config.to_dict()
