"""benchmarks/first_day.sh: whole, on two CPU processes; with stand-ins, what fails and exceeds."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import layout_losses
from tests import ROOT

SCRIPT = ROOT / "benchmarks" / "first_day.sh"
PARTS = ["versions", "doctor", "bandwidth", "gate", "parity", "step-3d", "step-dp", "step-tp"]


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """Programs of `folder` first; no virtual environment but this one."""
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MEGALITE_VENV": str(folder / "none"),
        "TMPDIR": str(folder),
    }


def first_day(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *options],
        cwd=folder,
        env=environment(folder / "bin"),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def unpacked(output: str) -> dict[str, str]:
    """Texts of the archive whose path is the last line, by name; of binary files the length."""
    with tarfile.open(output.splitlines()[-1]) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode("latin-1")  # type: ignore[union-attr]
            for member in archive
            if member.isfile()
        }


def results(files: dict[str, str]) -> dict[str, str]:
    lines = [json.loads(line) for line in files["parts.jsonl"].splitlines()]
    assert all(set(line) == {"part", "result", "code", "seconds", "limit_s"} for line in lines)
    return {line["part"]: line["result"] for line in lines}


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
def test_what_the_parts_find_is_in_the_archive(tmp_path: Path) -> None:
    """Doctor and gate have tests of their own, and the other layouts run as the first does."""
    program(tmp_path / "bin", "nvidia-smi", 'echo "NVIDIA Stand-in, $*"')
    parts = ["versions", "bandwidth", "parity", "step-3d"]
    done = first_day(tmp_path, "--dry", "--parts", ",".join(parts), "--out", "found")
    files = unpacked(done.stdout)
    assert results(files) == dict.fromkeys(parts, "ok"), files
    assert done.returncode == 0, done.stderr
    assert "NVIDIA Stand-in, topo -m" in files["versions.log"]
    assert "\ntorch==2." in files["versions.log"]

    found = {(row["operation"], row["world_size"]) for row in rows(files["bandwidth.jsonl"])}
    operations = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    assert found == {(operation, 2) for operation in operations}
    (parity,) = rows(files["parity.jsonl"])
    assert parity["agrees"]
    assert parity["losses"] == pytest.approx(parity["losses_of_one"], rel=1e-4)
    assert len(set(parity["losses"])) == 2

    (step,) = rows(files["steps.jsonl"])
    assert (step["layout"]["text"].split(" zero")[0], step["steps"]) == ("tp1 pp2 dp1 1f1b", 1)
    run = "step-3d/mfu-0/quickstart"
    names = {name for name in files if name.partition("/")[2]}
    traces = {f"traces-step-3d/0-quickstart/rank-{rank}.json.gz" for rank in (0, 1)}
    assert names == {f"{run}/metrics.jsonl", f"{run}/pipeline.json", *traces}
    events = json.loads(gzip.decompress(files[min(traces)].encode("latin-1")))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert not list((tmp_path / "bin").glob("tmp.*")), "the folder of random tokens stays"


def test_layouts_that_differ_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is halved on one of them, a loss that is lost."""
    options = layout_losses.parse(["run.toml", "parallel.tp=2", "train.seed=3"])
    right = {"loss": 6.0, "grad_norm": 2.0, "grad_norms": {"head": 1.0, "norms": 1.5}}

    def agrees(ours: dict[str, Any]) -> bool:
        def steps_of(_: Any, settings: Sequence[str]) -> list[dict[str, Any]]:
            assert "train.seed=3" in settings
            return [right, ours if "parallel.tp=2" in settings else right]

        monkeypatch.setattr(layout_losses, "steps_of", steps_of)
        return bool(layout_losses.compare(options, "bfloat16")["agrees"])

    assert agrees(right)
    assert agrees(right | {"loss": 6.01})
    assert not agrees(right | {"loss": 6.1})
    assert not agrees(right | {"loss": "nan"})
    assert not agrees(right | {"grad_norm": 2.2})
    assert not agrees(right | {"grad_norms": {"head": 0.5, "norms": 1.5}})


def stand_ins(folder: Path) -> None:
    """Programs that answer at once: parity fails, the gate takes 30 s."""
    for name in ("nvidia-smi", "megalite", "torchrun"):
        program(folder, name, f'echo "{name} $*"')
    program(
        folder,
        "python",
        """case "$*" in
        *gpu_gate*) echo begun; sleep 30 ;;
        *layout_losses*) echo "losses differ" >&2; exit 1 ;;
        *) echo "python $*" ;;
        esac""",
    )


def test_a_part_that_fails_or_exceeds_its_limit_does_not_stop_the_others(tmp_path: Path) -> None:
    stand_ins(tmp_path / "bin")
    done = first_day(tmp_path, "--gpus", "8", "--limit", "gate=1")
    assert done.returncode == 1, done.stderr
    files = unpacked(done.stdout)
    ends = {"gate": "over its limit", "parity": "failed"}
    assert results(files) == dict.fromkeys(PARTS, "ok") | ends
    assert files["gate.log"] == "begun\n"
    assert files["parity.log"] == "losses differ\n"
    assert "--nproc-per-node=8 benchmarks/bandwidth.py" in files["bandwidth.log"]
    layouts = [
        [
            word.split(".")[1]
            for word in files[f"{part}.log"].split()
            if word.startswith("parallel.")
        ]
        for part in PARTS[5:]
    ]
    assert [[word for word in words if word[:2] in ("tp", "pp", "dp")] for words in layouts] == [
        ["tp=2", "pp=2", "dp=2"],
        ["tp=1", "pp=1", "dp=8"],
        ["tp=8", "pp=1", "dp=1"],
    ]


def test_the_settings_of_eight_gpus_are_those_of_legal_runs(tmp_path: Path) -> None:
    """What the stand-ins were called with, read by megalite itself."""
    from megalite.checks import open_run

    stand_ins(tmp_path / "bin")
    program(tmp_path / "bin", "python", 'printf "%s\\n" "$@"')
    files = unpacked(first_day(tmp_path, "--parts", "parity,step-3d,step-dp,step-tp").stdout)
    for part in PARTS[4:]:
        words = files[f"{part}.log"].splitlines()
        settings = [word for word in words if "=" in word and not word.startswith("--")]
        (config,) = [word for word in words if word.endswith(".toml")]
        assert open_run(config, settings, 8).config.data.seq_length >= 2048


def test_an_interrupted_day_is_packed(tmp_path: Path) -> None:
    stand_ins(tmp_path / "bin")
    process = subprocess.Popen(
        ["bash", str(SCRIPT), "--parts", "doctor,gate,parity", "--out", str(tmp_path / "found")],
        cwd=tmp_path,
        env=environment(tmp_path / "bin"),
        stdout=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "found" / "gate.log"
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert results(unpacked(output)) == {"doctor": "ok", "gate": "interrupted"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "3"], "--gpus 3; allowed are 2 and multiples of 4"),
        (["--parts", "gate,speed"], "no part speed; there are versions doctor"),
        (["--limit", "gate=soon"], "--limit gate=soon: give PART=SECONDS"),
        (["--limit", "speed=5"], "with a part of versions"),
        (["--config", "none.toml"], "no file none.toml"),
        (["--out"], "--out needs a value"),
        (["--out", "."], "exists; name a new folder"),
        (["--fast"], "no option --fast"),
    ],
)
def test_a_wrong_option_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    stand_ins(tmp_path / "bin")
    done = first_day(tmp_path, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "bin"]


def test_help_is_the_head_of_the_script(tmp_path: Path) -> None:
    done = first_day(tmp_path, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Everything that is worth knowing")
    assert done.stdout.rstrip().endswith("if it is there.")
