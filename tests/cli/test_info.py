"""What `megalite info` says of runs, checkpoints and datasets, sound and damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megalite.cli.main import app
from megalite.run.model_math import parameter_counts
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    SEQ_LENGTH,
    VOCAB,
    make_config,
    train,
    write_tokens,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """A dataset, and a run of four steps on it at tp 2, stopped after the third and resumed."""
    path = tmp_path_factory.mktemp("info")
    write_tokens(path / "data", 4 * GLOBAL_BATCH)
    config = make_config(
        path, "run", "tp2", train__steps=4, checkpoint__interval=2, pipeline__schedule="gpipe"
    )
    pool.run(train, 2, [(config, 3), (config, None)])
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["info", *(str(argument) for argument in arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


@pytest.mark.parametrize("what", ["run", "run/checkpoints/latest", "data"])
def test_nothing_that_is_described_needs_torch(folder: Path, what: str) -> None:
    code = f"""
import sys
sys.argv = ["megalite", "info", {str(folder / what)!r}]
from megalite.cli.main import main
try:
    main()
except SystemExit as stop:
    print("EXIT", stop.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "EXIT 0 False", done.stderr
    assert ("verified" in done.stdout) == (what != "data")


@pytest.mark.long
def test_a_run(folder: Path) -> None:
    found = as_json(folder / "run")
    config = make_config(folder, "run", "tp2")
    assert found["kind"] == "run"
    assert (found["step"], found["total_steps"], found["attempts"]) == (4, 4, 2)
    assert found["end"] == "finished"
    assert found["parameters"] == parameter_counts(config.model).total()
    assert found["layout"] == {"tp": 2, "pp": 1, "vpp": 1, "dp": 1}
    assert found["schedule"] == "gpipe"
    assert found["optimizer"] == {"name": "adamw", "zero": 0}
    assert found["consumed_tokens"] == 4 * GLOBAL_BATCH * SEQ_LENGTH
    assert found["hardware"]["peak_tflops"] is None
    assert [(c["name"], c["sound"]) for c in found["checkpoints"]] == [
        ("step-00000002", True),
        ("step-00000003", True),
        ("step-00000004", True),
    ]
    text = invoke(folder / "run").output
    assert f"loss         {found['loss']:.4f}\n" in text
    assert "steps        4 of 4, 256 tokens, attempt 2, finished\n" in text
    assert "step-00000004  0." in text
    assert "peak n/a" in text
    assert found["kernels"] == {"name": "reference", "table": None}
    assert "kernels      reference\n" in text


def test_a_checkpoint(folder: Path) -> None:
    path = folder / "run" / "checkpoints" / "step-00000004"
    found = as_json(path)
    assert (found["kind"], found["step"], found["verified"]) == ("checkpoint", 4, "sha256")
    assert found["saved_at"] == {"tp": 2, "cp": 1, "dp": 1, "pp": 1}
    config = make_config(folder, "run", "tp2")
    assert found["stored_weights"] == parameter_counts(config.model, padded=True).total()
    assert {"param", "exp_avg", "exp_avg_sq"} <= set(found["states"])
    assert as_json(path, "--quick")["verified"] == "size"
    assert "saved at     tp 2 x cp 1 x dp 1 x pp 1\n" in invoke(path).output
    assert "kernels      reference\n" in invoke(path).output
    assert "schedule     gpipe\noptimizer    adamw, ZeRO-0\n" in invoke(path).output


@pytest.mark.parametrize("name", ["", "latest"])
def test_a_folder_of_checkpoints_stands_for_the_newest(folder: Path, name: str) -> None:
    found = as_json(folder / "run" / "checkpoints" / name)
    assert (found["kind"], found["step"]) == ("checkpoint", 4)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_dataset(folder: Path, suffix: str) -> None:
    found = as_json(f"{folder / 'data'}{suffix}")
    assert (found["kind"], found["sound"], found["dtype"]) == ("dataset", True, "uint16")
    assert found["tokens"] == 4 * GLOBAL_BATCH * SEQ_LENGTH + 1
    assert found["bytes"] == 2 * found["tokens"]
    assert found["documents"] > 1
    assert "checks       good\n" in invoke(folder / "data").output
    assert VOCAB < 2**16


def test_damage_is_told_not_refused(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    shard = next((run / "checkpoints" / "step-00000004").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], '{"kind": "step", "st']))
    found = as_json(run)
    assert [c["sound"] for c in found["checkpoints"]] == [True, True, False]
    assert shard.name in found["checkpoints"][2]["problem"]
    assert (found["step"], found["end"]) == (4, None)
    assert f"line {len(lines)}" in found["damage"]
    text = invoke(run).output
    assert "step-00000004  BAD: " in text
    assert "running or cut off" in text
    assert invoke(run / "checkpoints" / "step-00000004").exit_code == 2
    assert all(c["sound"] for c in as_json(run, "--quick")["checkpoints"])


def test_a_run_that_has_not_stepped_yet(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run", "attempt": 1, "config": {}}\n')
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    assert "steps        n/a of n/a, n/a tokens, running or cut off\n" in result.output
    assert "checkpoints  none\n" in result.output
    assert "schedule     n/a\noptimizer    n/a\n" in result.output


def test_something_else_is_refused_in_a_line(folder: Path, tmp_path: Path) -> None:
    for path, text in (
        (tmp_path / "gone", "does not exist"),
        (tmp_path, "is none of these"),
    ):
        result = invoke(path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1
        assert text in result.stderr
