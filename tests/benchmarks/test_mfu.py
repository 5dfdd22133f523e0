"""benchmarks/mfu.py as a command, that of docs/cluster.md too: rows, table, a config that fails."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.config.text import to_toml
from megalite.process.launcher import Launch
from tests import ROOT
from tests.train.kit.runs import make_config

pytestmark = pytest.mark.long


def command(folder: Path, *arguments: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, JSON lines and the rest of standard output."""
    done = subprocess.run(
        [*arguments, "--steps=3", "--warmup=1", f"--work={folder / 'work'}"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    rest = "\n".join(line for line in lines if not line.startswith("{"))
    assert rows, done.stderr
    return done.returncode, rows, rest


def on_cpus() -> list[str]:
    """The command of docs/cluster.md for a CPU, in words: python, script, config, options."""
    lines = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("python benchmarks/mfu.py "))
    return shlex.split(line)


def config(folder: Path, name: str, layout: str, **changes: Any) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(to_toml(make_config(folder, name, layout, **changes)))
    return path


def check(row: dict[str, Any], world_size: int) -> None:
    assert (row["world_size"], row["steps"], row["warmup"]) == (world_size, 3, 1)
    assert row["model"]["layers"] == 4
    assert row["tokens_per_s_per_gpu"] == pytest.approx(
        row["layout"]["global_batch"] * row["model"]["seq_length"] / row["step_time_s"] / world_size
    )
    assert 0 < row["tflops_causal_per_gpu"] < row["tflops_per_gpu"]
    assert row["mfu"] is row["mfu_causal"] is row["hardware"]["peak_tflops"] is None
    assert row["memory_peak_bytes"] > 2**20
    assert sum(row["time_split"].values()) == pytest.approx(1.0, abs=0.01)
    assert row["versions"]["torch"]
    assert len(row["commit"]) == 40


def test_configs_are_measured_here_and_one_that_fails_does_not_stop_the_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.toml").write_text("[model]\nfamily = 'lama'\n")
    # Neither its length in tokens nor its shares for evaluation matter: random tokens, few steps.
    lengths = {"train__tokens": 192, "train__steps": 0, "data__split": (0.9, 0.1)}
    serial = config(tmp_path, "serial", "serial", **lengths)
    _, script, documented, *options = on_cpus()
    configs = [serial, tmp_path / "broken.toml", ROOT / documented]
    code, rows, rest = command(tmp_path, sys.executable, ROOT / script, *configs, *options)
    assert code == 1
    check(rows[0], 1)
    check(rows[2], 4)
    assert "did you mean llama?" in rows[1]["error"]
    table = [line.strip("| ").split(" | ") for line in rest.strip().splitlines()]
    assert [cells[0] for cells in table[2:]] == [str(path) for path in configs]
    assert table[0][3:5] == ["tokens/s/GPU", "TFLOP/s/GPU"]
    assert table[2][2:4] == ["1", f"{rows[0]['tokens_per_s_per_gpu']:.0f}"]
    assert table[3][1].startswith("failed: ")
    assert rows[2]["layout"]["text"].startswith("tp2+sp pp2x2 dp1 interleaved zero1 ")
    assert not list(tmp_path.rglob("step-*")), "no checkpoint is written"


def mfu_module() -> Any:
    spec = importlib.util.spec_from_file_location("mfu", ROOT / "benchmarks" / "mfu.py")
    assert spec is not None
    assert spec.loader is not None
    mfu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mfu)
    return mfu


def test_a_process_that_dies_is_a_row_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mfu = mfu_module()
    dies = tmp_path / "dies.py"
    dies.write_text("raise MemoryError('out of memory')")
    monkeypatch.setattr(mfu, "_RUN", dies)
    options = mfu.parse([str(config(tmp_path, "one", "serial")), "--steps=3", "--warmup=0"])
    row = mfu.measure(options, Launch(), 0, options.configs[0], tmp_path)
    assert row == {"config": options.configs[0], "error": "MemoryError: out of memory"}
    assert "failed: MemoryError" in mfu.table([row])


def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ROOT / "benchmarks" / "mfu.py"
    path = config(tmp_path, "two", "tp2")
    code, rows, _ = command(tmp_path, sys.executable, *torchrun, script, path)
    assert code == 0
    assert len(rows) == 1
    check(rows[0], 2)


def test_ranks_of_a_launcher_need_a_folder_that_they_share(tmp_path: Path) -> None:
    """Each would make random tokens in a temporary folder of its own."""
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    launcher |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "mfu.py", config(tmp_path, "two", "tp2")],
        env={**os.environ, **launcher},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "give --work a folder that all of them share" in done.stderr


def test_settings_stand_among_configs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    mfu = mfu_module()
    options = mfu.parse(["a.toml", "--local", "parallel.dp=1", "b.toml", "train.seed=2"])
    assert options.configs == ["a.toml", "b.toml"]
    assert options.settings == ["parallel.dp=1", "train.seed=2"]
    with pytest.raises(SystemExit):
        mfu.parse(["parallel.dp=1"])
    assert "give the TOML file of a run" in capsys.readouterr().err
