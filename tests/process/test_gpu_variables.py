"""Defaults for variables of torch, and the user's own settings."""

from __future__ import annotations

import subprocess
import sys
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest

from megalite.process.gpu_variables import prepare_gpus, recorder_advice


def test_defaults_and_where_the_recorder_writes(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    assert recorder_advice(environ) == ""
    prepare_gpus(tmp_path / "run", environ)
    assert environ == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/run/flight_recorder_rank_",
    }
    assert recorder_advice(environ) == (
        f"after train.timeout_s torch writes the last operations of each rank to "
        f"{tmp_path}/run/flight_recorder_rank_RANK; "
        f"torchfrtrace --prefix flight_recorder_rank_ {tmp_path}/run compares them"
    )


@pytest.mark.parametrize(
    "own",
    [
        {
            "PYTORCH_CUDA_ALLOC_CONF": "backend:native",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/scratch/trace_",
        },
        {
            "PYTORCH_ALLOC_CONF": "",
            "TORCH_FR_BUFFER_SIZE": "7",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "true",
            "TORCH_FR_DUMP_TEMP_FILE": "/scratch/trace_",
        },
    ],
    ids=["earlier names", "present names"],
)
def test_what_the_user_has_set_wins(own: dict[str, str], tmp_path: Path) -> None:
    environ = dict(own)
    prepare_gpus(tmp_path, environ)
    assert environ == own
    assert "to /scratch/trace_RANK; torchfrtrace --prefix trace_ /scratch" in recorder_advice(own)


@pytest.mark.parametrize(
    "environ", [{"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "false"}]
)
def test_a_recorder_that_is_off_is_not_named(environ: dict[str, str], tmp_path: Path) -> None:
    prepare_gpus(tmp_path, environ)
    assert recorder_advice(environ) == ""


def test_torch_takes_the_setting_of_its_allocator_after_its_import() -> None:
    """By torch's own parser, which reads the variable once, when it is first asked."""
    script = (
        "import torch, pathlib; from megalite.process.gpu_variables import prepare_gpus;"
        "prepare_gpus(pathlib.Path());print(torch._C._accelerator_getAllocatorSettings())"
    )
    environ = {"PATH": "/usr/bin"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "expandable_segments:True"


def test_torch_knows_the_names() -> None:
    """Those that a torch without CUDA has in it."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"):
            assert text.find(name.encode() + b"\0") > 0
