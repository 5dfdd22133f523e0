"""Whole runs with all views on: no key ends up in the run folder, no service holds a run up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.errors import MegaliteError
from megalite.process.secrets import HIDDEN, Redaction
from megalite.train.loop import Trainer
from tests.pool import RankPool
from tests.train.kit.runs import GLOBAL_BATCH, lines, make_config, train_one, write_tokens

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_qwertyuiopasdfghjklzxcvbnm",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views")
    write_tokens(path / "data", 3 * GLOBAL_BATCH)
    return path


def run_with(ctx: Any, config: RunConfig, environment: dict[str, str], error: str = "") -> Any:
    """Runs in a rank: a run under an environment; with `error`, one that ends in its first step."""
    before = dict(os.environ)
    os.environ.update(environment)
    step = Trainer._step
    if error:

        def fail(self: Trainer, flag: Any) -> Any:
            self.console.print(f"calling {error}")
            raise MegaliteError(f"no answer from {error}")

        Trainer._step = fail
    try:
        return train_one(ctx, config)
    finally:
        Trainer._step = step
        os.environ.clear()
        os.environ.update(before)


def views(folder: Path, name: str, layout: str = "serial", **changes: Any) -> RunConfig:
    wandb = {"project": "p", "mode": "offline", **changes}
    return make_config(
        folder,
        name,
        layout,
        train__steps=3,
        checkpoint__interval=2,
        log__tensorboard=True,
        log__format="megatron",
        log__wandb=wandb,
    )


@pytest.mark.long
def test_no_key_of_the_environment_is_in_the_run_folder(pool: RankPool, folder: Path) -> None:
    config = views(folder, "secret")
    address = f"https://user:{SECRETS['HF_TOKEN']}@example.org?k={SECRETS['WANDB_API_KEY']}"
    environment = {**SECRETS, "WANDB_CACHE_DIR": str(folder / "cache")}
    (failed,) = pool.run(run_with, 1, config, environment, address)
    assert failed.code is None
    (done,) = pool.run(run_with, 1, config, environment)
    assert done.code == 0, done.error
    files = [path for path in (folder / "secret").rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files}
    assert {".jsonl", ".toml", ".txt", ".safetensors", ".json", ".wandb"} <= kinds
    assert any("tfevents" in path.name for path in files)
    for path in files:
        content = path.read_bytes()
        for name, value in SECRETS.items():
            assert value.encode() not in content, f"{path} holds {name}"
    log = (folder / "secret" / "log.txt").read_text()
    assert f"calling https://user:{HIDDEN}@example.org?k={HIDDEN}\n" in log
    assert f"user:{HIDDEN}@" in lines(folder / "secret", "end")[0]["reason"]
    assert " iteration        3/       3 | consumed samples:           12 | " in log


def test_a_service_that_cannot_be_reached_costs_one_warning(pool: RankPool, folder: Path) -> None:
    """One of the ranks has the views, so there is one warning, one run, one file of events."""
    config = views(folder, "unreachable", "tp2", mode="auto")
    environment = {
        "WANDB_API_KEY": SECRETS["WANDB_API_KEY"],
        "WANDB_BASE_URL": "http://127.0.0.1:1",  # nobody listens
        "WANDB_CACHE_DIR": str(folder / "cache"),
    }
    for done in pool.run(run_with, 2, config, environment):
        assert done.code == 0, done.error
    run = folder / "unreachable"
    assert [line["step"] for line in lines(run, "step")] == [1, 2, 3]
    log = (run / "log.txt").read_text()
    assert log.count("warning: ") == 1
    assert "warning: wandb at http://127.0.0.1:1 cannot be reached; this run is kept" in log
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    assert len(list((run / "tensorboard").iterdir())) == 1


def test_what_counts_as_secret() -> None:
    environment = {
        "WANDB_API_KEY": "aaaaaaaaaa",
        "hf_token": "bbbbbbbbbb",
        "DB_PASSWORD": "cccccccccc",
        "SHORT_KEY": "d",
        "KEYBOARD": "eeeeeeeeee",
        "TOKENIZERS_PARALLELISM": "ffffffffff",
        "HOME": "gggggggggg",
    }
    hide = Redaction(environment)
    text = " ".join(environment.values())
    assert hide(text) == f"{HIDDEN} {HIDDEN} {HIDDEN} d eeeeeeeeee ffffffffff gggggggggg"
    assert Redaction({})(text) == text
    longer = Redaction({"A_KEY": "12345678", "B_KEY": "1234567890"})
    assert longer("1234567890") == HIDDEN
