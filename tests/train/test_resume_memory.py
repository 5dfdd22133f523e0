"""A run that fits can be resumed: loading its state needs no more memory than training does."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path

import pytest

from megalite.config import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.train.loop import Trainer
from tests.checkpoint.kit import in_child
from tests.train.kit.runs import make_config, write_tokens

pytestmark = pytest.mark.long

MIB = 1 << 20
ALLOWED_GROWTH = 1.15


def resident_bytes(field: str) -> int:
    """A field of this process's memory status: VmRSS (now) or VmHWM (the most since a reset)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def run_and_note_peak(config: RunConfig, stop_at: int | None, note: Path) -> None:
    """In a fork: train, then write by how much the peak lay above the start.

    What earlier tests freed and malloc kept is given back first, or the run would fill it unseen.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # start a new peak
    before = resident_bytes("VmRSS")
    Trainer(config, Mesh(Topology())).run(stop_at)
    note.write_text(str(resident_bytes("VmHWM") - before))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_needs_no_second_copy_of_the_state(tmp_path: Path, dtype: str) -> None:
    write_tokens(tmp_path / "data", 8)
    config = make_config(
        tmp_path,
        dtype,
        model__hidden_size=512,
        model__ffn_hidden_size=2048,
        optimizer__bucket_mb=4.0,
        optimizer__warmup_steps=0,
        optimizer__zero=1,
        train__steps=4,
        train__dtype=dtype,
        eval__interval=0,
    )
    peaks = []
    for stop_at in (2, None):
        note = tmp_path / "peak"
        assert in_child(partial(run_and_note_peak, config, stop_at, note)) == 0
        peaks.append(int(note.read_text()))
    first, resumed = peaks
    assert first > 240 * MIB, f"the state must dominate, the run took {first / MIB:.0f} MiB"
    assert resumed <= ALLOWED_GROWTH * first, f"{resumed / MIB:.0f} of {first / MIB:.0f} MiB"
