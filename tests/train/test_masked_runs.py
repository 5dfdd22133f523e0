"""Runs on masked, packed documents: the exact mean over trained tokens at every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.corpus.indexed_writer import IndexedWriter
from megalite.data.batches import Batches
from megalite.data.dataset import TokenDataset
from megalite.data.samples import Packing
from megalite.errors import ConfigError, DataError
from megalite.train.batch import Upload
from megalite.train.run_data import open_data
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64
from tests.train.kit.runs import (
    SEQ_LENGTH,
    VOCAB,
    lines,
    losses,
    make_config,
    train,
    world_size,
    write_tokens,
)

CHATS: dict[str, Any] = {
    "data__packing": "documents",
    "data__document_masks": True,
    "train__steps": 3,
    "train__global_batch": 8,
    "train__micro_batch": 1,
}
LEARNED = {"model__positions": "learned", "model__max_positions": SEQ_LENGTH}


def write_chats(prefix: Path, num_documents: int = 60, trained: float = 0.4) -> Path:
    """Documents of 2 to 30 tokens; of some no token is trained on."""
    generator = np.random.default_rng(5)
    with IndexedWriter(prefix, VOCAB) as writer:
        for number in range(num_documents):
            length = int(generator.integers(2, 30))
            mask = generator.random(length) < (trained if number % 3 else 0.0)
            writer.add_document(generator.integers(1, VOCAB, length), mask)
        writer.publish()
    return prefix


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("masked")
    write_chats(path / "data")
    return path


@pytest.mark.parametrize("positions", [{}, {**LEARNED, "data__reset_positions": True}])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "3d"])
def test_the_loss_is_the_mean_over_trained_tokens_at_every_layout(
    pool: RankPool, folder: Path, layout: str, positions: dict[str, Any]
) -> None:
    changes = {**CHATS, **positions, "train__dtype": "float64"}
    kind = "learned" if positions else "rope"
    serial = make_config(folder, f"serial-{kind}", **changes)
    if not serial.folder.exists():
        pool.run(train, 1, [(serial,)])
    other = make_config(folder, f"{layout}-{kind}", layout, **changes)
    pool.run(train, world_size(other), [(other,)])
    assert losses(other.folder) == pytest.approx(losses(serial.folder), rel=PARITY_FLOAT64)

    # The tokens that the loss is a mean of are the trained ones, counted here by hand.
    data = TokenDataset(folder / "data")
    batches = Batches(data.span("train"), Packing(SEQ_LENGTH, True), 1234, document_masks=True)
    for step, line in enumerate(lines(other.folder, "step")):
        found = batches.rank_batches(8 * step, 8, 8, 0, 1)[0]
        assert line["loss_tokens"] == int(found.loss_weight.sum()) > 0


def test_positions_that_begin_anew_make_packed_documents_as_if_alone(folder: Path) -> None:
    data = TokenDataset(folder / "data")
    batches = Batches(data.span(), Packing(SEQ_LENGTH, True), 0, document_masks=True)
    upload = Upload(torch.device("cpu"), torch.float64, reset_positions=True)
    (batch,) = upload.token_batches(batches.rank_batches(0, 4, 4, 0, 1), 1.0)
    assert batch.position_T is not None
    wanted = [
        place
        for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
        for place in range(stop - start)
    ]
    assert batch.position_T.tolist() == wanted
    assert len(batch.cu_seqlens) > 5


@pytest.mark.parametrize("layout", ["serial", "dp2"])
def test_a_step_without_a_trained_token_is_no_nan(
    pool: RankPool, tmp_path: Path, layout: str
) -> None:
    write_chats(tmp_path / "data", trained=0.0)
    config = make_config(tmp_path, "none", layout, **CHATS)
    outcomes = pool.run(train, world_size(config), [(config,)])
    assert [run.code for rank in outcomes for run in rank] == [0] * world_size(config)
    steps = lines(config.folder, "step")
    assert [line["loss_tokens"] for line in steps] == [0, 0, 0]
    assert all(math.isfinite(line["loss"]) and line["loss"] == 0 for line in steps)
    assert all(math.isfinite(line["grad_norm"]) for line in steps)


def test_a_run_reports_how_documents_were_packed(pool: RankPool, folder: Path) -> None:
    config = make_config(folder, "notes", **{**CHATS, "data__long_documents": "drop"})
    pool.run(train, 1, [(config,)])
    log = (config.folder / "log.txt").read_text()
    assert "data data: whole documents fill " in log
    assert "documents of more than 17 tokens are left out, with " in log


def test_evaluation_data_without_a_trained_token_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", 20)
    write_chats(tmp_path / "untrained", trained=0.0)
    sets = [{"name": "chats", "path": str(tmp_path / "untrained")}]
    packed = {k: v for k, v in CHATS.items() if k.startswith("data")}
    config = make_config(tmp_path, "a", **packed, eval__sets=sets, eval__interval=1)
    with pytest.raises(DataError, match=r"eval set chats: of its .* tokens none is trained on"):
        open_data(config)
    changes: dict[str, Any] = {"data__path": str(tmp_path / "untrained")}
    changes["data__split"] = (0.5, 0.5)
    split = make_config(tmp_path, "b", **packed, **changes, eval__interval=1)
    with pytest.raises(DataError, match=r"validation: of its .* tokens none is trained on"):
        open_data(split)


def test_weights_by_size_take_each_sample_alike(tmp_path: Path) -> None:
    write_tokens(tmp_path / "small", 10)
    write_tokens(tmp_path / "large", 30, seed=1)
    entries: list[dict[str, Any]] = [{"path": str(tmp_path / name)} for name in ("small", "large")]
    changes: dict[str, Any] = {"data__path": None, "data__sources": entries}
    train_data = {
        weights: open_data(make_config(tmp_path, "a", **changes, data__weights=weights)).train
        for weights in ("given", "size")
    }
    assert train_data["given"].blend.counts(40) == [20, 20]
    assert train_data["size"].blend.counts(40) == [10, 30]
    entries[0]["weight"] = 2  # two epochs of the small one in each of the large one
    twice = open_data(make_config(tmp_path, "a", **changes, data__weights="size")).train
    assert twice.blend.counts(50) == [20, 30]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__packing": "documents"}, "set data.document_masks=true"),
        ({"data__long_documents": "drop"}, "set data.packing=documents"),
        ({"data__reset_positions": True}, "rotary positions count as differences"),
        ({"data__eod_mask_loss": True, "data__document_masks": True}, "masks these labels, too"),
        ({"data__weights": "size"}, "data.path is the only source"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, "a", **changes)
