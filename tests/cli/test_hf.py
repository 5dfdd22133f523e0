"""`megalite hf`: from a folder to a checkpoint and back, and options that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config.load import load_config
from tests.exchange.kit import MODELS, edit, save, stock, whole


def call(*words: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["hf", *words])
    return done.exit_code, (done.stderr if done.exit_code else done.stdout).splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save(stock(MODELS["llama3"]), tmp_path / "a")


def test_in_and_out_with_a_check(folder: Path) -> None:
    edit(folder, mup=1)
    code, lines = call("import", "a", "out")
    assert code == 2
    assert lines == [
        "error: reading a: config.json: mup = 1 is not known for LlamaForCausalLM; if it changes "
        "nothing, add --ignore mup"
    ]
    code, lines = call("import", "a", "out", "--ignore", "mup", "--check")
    assert code == 0
    assert lines[0].startswith("wrote out: LlamaForCausalLM, 31,808 weights, and model.toml; ")
    assert lines[0].endswith("parallel.tp may be a divisor of 2")
    checked = "checked with transformers: logits of 64 tokens are equal to "
    assert lines[-1].startswith(checked)

    # The table is a base of a config, and says the same model.
    own = 'base = "out/model.toml"\n[data]\npath = "x"\nseq_length = 8\n[train]\nsteps = 1\n'
    Path("run.toml").write_text(f"{own}global_batch = 1\n")
    model = load_config("run.toml", []).config.model
    assert (model.rope_scaling, model.rope_theta, model.norm_eps) == ("llama3", 40.0, 3e-3)
    assert (model.vocab_size, model.vocab_pad_multiple, model.tie_embeddings) == (61, 128, True)

    code, lines = call("export", "out", "back", "--check")
    assert code == 0
    before, after = whole(folder), whole(Path("back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    info = CliRunner().invoke(app, ["info", "out"]).output
    assert "began from   a (LlamaForCausalLM)" in info


def test_options_that_cannot_be_are_reported_together() -> None:
    code, lines = call("export", "x", "y", "--dtype", "int8", "--names", "nemo")
    assert (code, lines) == (
        2,
        ["error: --dtype=int8: use float32 or bfloat16 or float16",
         "error: --names=nemo: use transformers or megatron-core"],
    )  # fmt: skip
    code, lines = call("export", "x", "y", "--names", "megatron-core", "--check")
    assert (code, lines) == (
        2, ["error: --check: transformers does not load --names=megatron-core; leave one out"]
    )  # fmt: skip


def test_what_is_no_folder(folder: Path) -> None:
    code, lines = call("import", "nothing", "out")
    assert code == 2
    assert "nothing is no folder; give one with config.json and model.safetensors" in lines[0]
    call("import", "a", "out")
    assert call("import", "a", "out") == (2, ["error: out exists; give a new name, or remove it"])
