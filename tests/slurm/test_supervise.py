"""What becomes of a job after an attempt: launch/supervise.py, from files alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from megalite.checkpoint.names import MANIFEST, checkpoints_of, list_steps
from megalite.errors import EXIT_SAVED, EXIT_USER
from tests import ROOT

LOGS = "slurm-7"


@pytest.fixture(scope="module")
def supervise() -> ModuleType:
    spec = importlib.util.spec_from_file_location("supervise", ROOT / "launch" / "supervise.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_repeats_the_exit_codes_that_it_cannot_import(supervise: ModuleType) -> None:
    assert (supervise.REQUEUE, supervise.USER_ERROR) == (EXIT_SAVED, EXIT_USER)
    assert f"\n{EXIT_SAVED})\n" in (ROOT / "launch" / "pretrain.sbatch").read_text()


def test_it_finds_checkpoints_as_the_package_does(supervise: ModuleType, tmp_path: Path) -> None:
    root = checkpoints_of(tmp_path)
    for name in ("step-00000007", "step-123456789", ".tmp-step-99999999999-x", ".trash-step-9"):
        (root / name).mkdir(parents=True)
        (root / name / MANIFEST).write_text("{}")
    assert supervise.newest_step(tmp_path) == list_steps(root)[-1][0] == 123456789


def save(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def attempt(
    supervise: ModuleType,
    run: Path,
    number: int,
    *,
    saves: int | None = None,
    code: int = 1,
    signal: str = "",
    log: str = "",
) -> tuple[int, str]:
    """The verdict on an attempt that saved a step and left a log."""
    supervise.begin(run, run / LOGS, number)
    if saves is not None:
        save(run, saves)
    folder = run / LOGS / f"attempt-{number}"
    folder.mkdir()
    (folder / "node1.log").write_text(log)
    verdict: tuple[int, str] = supervise.end(run, run / LOGS, number, code, signal)
    return verdict


def test_the_run_folder_is_read_from_the_printed_settings(supervise: ModuleType) -> None:
    shown = 'name      "a \\"b\\""   runs/x.toml\nout       "runs/mine"    default\n'
    assert supervise.run_folder(shown) == Path('runs/mine/a "b"')
    with pytest.raises(KeyError):
        supervise.run_folder("nothing")


def test_a_finished_run_is_done(supervise: ModuleType, tmp_path: Path) -> None:
    assert attempt(supervise, tmp_path, 0, saves=9, code=0)[0] == 0


def test_a_cut_or_failed_attempt_with_progress_is_requeued(
    supervise: ModuleType, tmp_path: Path
) -> None:
    code, why = attempt(supervise, tmp_path, 0, saves=5, signal="USR1")
    assert (code, why) == (75, "the time limit is near; goes on from step 5")
    code, why = attempt(supervise, tmp_path, 1, saves=9, code=137)
    assert (code, why) == (75, "srun ended with code 137; goes on from step 9")


def test_two_attempts_without_a_new_checkpoint_stop_the_job(
    supervise: ModuleType, tmp_path: Path
) -> None:
    assert attempt(supervise, tmp_path, 0, saves=5)[0] == 75
    assert attempt(supervise, tmp_path, 1)[0] == 75
    code, why = attempt(supervise, tmp_path, 2, code=134, signal="USR1")
    assert code == 134
    assert why.startswith("2 attempts in a row saved no new checkpoint (newest: step 5)")


def test_one_that_slurm_requeued_counts_and_progress_forgives(
    supervise: ModuleType, tmp_path: Path
) -> None:
    supervise.begin(tmp_path, tmp_path / LOGS, 0)  # its node failed: nobody saw its end
    assert attempt(supervise, tmp_path, 1, saves=3)[0] == 75
    assert attempt(supervise, tmp_path, 2)[0] == 75
    assert attempt(supervise, tmp_path, 3, saves=4)[0] == 75


def test_an_unfinished_checkpoint_is_no_progress(supervise: ModuleType, tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    (tmp_path / "checkpoints" / ".tmp-step-00000010-x").mkdir()
    assert supervise.newest_step(tmp_path) == 5


def test_an_error_of_the_user_is_not_tried_again(supervise: ModuleType, tmp_path: Path) -> None:
    log = (
        "step 1/9 ...\n[rank 3] error: data.path=x: no such file\nerror: second\n  error: quoted\n"
    )
    code, why = attempt(supervise, tmp_path, 0, saves=5, log=log)
    assert code == 2
    assert why.endswith(": data.path=x: no such file; second")


def test_a_cancelled_job_is_not_requeued_from_here(supervise: ModuleType, tmp_path: Path) -> None:
    assert attempt(supervise, tmp_path, 0, saves=5, code=143, signal="TERM")[0] == 143
