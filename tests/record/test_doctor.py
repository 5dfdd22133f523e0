"""What `megalite doctor` finds, and how it says so."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner, Result

from megalite.cli.main import app
from megalite.record import doctor
from megalite.record.doctor import Finding, examine, exit_code


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *(str(argument) for argument in arguments)])


def found(name: str, out: Path = Path("runs")) -> Finding:
    (finding,) = [finding for finding in examine(out) if finding.name == name]
    return finding


def test_this_machine_can_train_and_json_says_the_same(tmp_path: Path) -> None:
    result = invoke("--json", "--out", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["ok"] is True
    names = [finding["name"] for finding in report["findings"]]
    for name in ("python", "torch", "apex", "gloo", "host name", "open files", "locked memory"):
        assert name in names
    for name in ("/dev/shm", "disk of out", "run folders", "triton", "tensorboard", "wandb"):
        assert name in names
    told = {finding["name"]: finding["found"] for finding in report["findings"]}
    if not torch.cuda.is_available():
        assert told["kernels"].startswith("plain torch by kernels.backend=auto: the device is cpu")
        assert told["attention"].startswith("kernels.attention may be auto, sdpa_flash; not sdpa_c")
    for finding in report["findings"]:
        assert bool(finding["remedy"]) == (finding["status"] != "ok")
    text = invoke("--out", tmp_path / "runs")
    assert text.exit_code == 0
    assert text.output.splitlines()[-1] == "ready to train"
    assert f"torch          {torch.__version__}" in text.output or torch.__version__ in text.output
    assert not (tmp_path / "runs").exists()  # it changes nothing


def test_what_is_missing_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_numpy(package: str) -> str:
        if package == "numpy":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor, "version", without_numpy)
    result = invoke()
    assert result.exit_code == 1
    assert "MISS numpy" in result.output
    assert "-> pip install numpy" in result.output
    assert result.output.splitlines()[-1] == "not ready: see the lines marked MISS"


@pytest.mark.parametrize(
    ("installed", "status", "text"),
    [
        ((), "ok", "not installed; megalite's own kernels are used"),
        (("apex", "amp_C"), "ok", "NVIDIA's"),
        (("apex",), "warning", "web toolkit"),
    ],
)
def test_the_wrong_apex_is_told_from_the_right_one(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], status: str, text: str
) -> None:
    monkeypatch.setattr(doctor, "is_installed", lambda package: package in installed)
    finding = doctor._apex()
    assert (finding.status, text in finding.found) == (status, True)
    assert "pip install apex" not in finding.remedy


def test_an_impostor_is_found_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "pip uninstall apex" in found("apex").remedy


def test_small_shared_memory_few_files_and_a_full_disk_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 2**30))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    findings = {finding.name: finding for finding in examine(tmp_path)}
    for name, remedy in (
        ("/dev/shm", "--shm-size"),
        ("open files", "ulimit -n"),
        ("disk of out", "12 bytes a parameter"),
    ):
        assert findings[name].status == "warning", name
        assert remedy in findings[name].remedy
    assert exit_code(list(findings.values())) == 0


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("--out", tmp_path / "file" / "runs")
    assert result.exit_code == 1
    assert "MISS run folders" in result.output


def gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Finding]:
    """The findings on a machine with one GPU of that name."""
    properties: Any = type(
        "P", (), {"name": name, "total_memory": 141 * 2**30, "major": 9, "minor": 0}
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return {finding.name: finding for finding in examine(Path("runs"))}


def test_devices_have_the_peak_of_their_file_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = gpu(monkeypatch, "NVIDIA H200")
    assert findings["gpu 0"].status == "ok"
    assert "141.0 GiB, compute capability 9.0, peak 989.4 TFLOP/s" in findings["gpu 0"].found
    assert findings["nccl"].status == "missing"  # this torch is built for the CPU
    unknown = gpu(monkeypatch, "NVIDIA H20")["gpu 0"]
    assert unknown.status == "warning"
    assert "peak n/a" in unknown.found
    assert "megalite configs hardware/h100" in unknown.remedy


def test_a_host_name_without_an_address_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, status in (("127.0.1.1", "warning"), ("10.0.0.5", "ok")):
        monkeypatch.setattr(socket, "gethostbyname", lambda name, a=address: a)
        assert doctor._host_name().status == status

    def unknown(name: str) -> str:
        raise OSError("no such name")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert doctor._host_name().status == "warning"
    assert sys.version_info >= doctor._MIN_PYTHON
