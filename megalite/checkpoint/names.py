"""The names of checkpoints and their folders, and where a path leads. Without torch.

A run has its checkpoints in `RUN/checkpoints`, each a directory `step-00001000`. Beside them there
may be the pointer `latest`, for people and scripts, and hidden names: `.tmp-*` is being written,
`.trash-*` is being deleted, `.replaced-step-*` is the older checkpoint of a step that is being
saved again.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

LATEST, MANIFEST = "latest", "manifest.json"
TMP, TRASH, REPLACED = ".tmp-", ".trash-", ".replaced-"
_CHECKPOINTS = "checkpoints"
_RUNS = Path("runs")  # where runs lie, unless the config's `out` says otherwise
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Directory name of a step: `step-00001000`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in the name of a finished checkpoint directory; None for any other name."""
    match = _STEP.fullmatch(name.removeprefix(REPLACED))
    if match is None:
        return None
    step = int(match[1])
    return step if match[0] == step_name(step) else None  # not step-0000000001 of ten digits


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every finished checkpoint in `root`, oldest step first.

    Order is by number. A step whose replacement was interrupted is listed with its old directory.
    The checkpoints are not verified.
    """
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        # ".replaced-" sorts before "step-", so a finished directory overwrites its entry.
        step = step_of(path.name)
        if step is not None and path.is_dir():
            found[step] = path
    return sorted(found.items())


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run / _CHECKPOINTS


def is_checkpoint(path: Path) -> bool:
    """True if `path` has a checkpoint's name or its manifest."""
    return step_of(path.name) is not None or (path / MANIFEST).is_file()


def folder_of(path: Path) -> Path:
    """The folder of checkpoints that `path` leads to: itself, a run's, or the one of `latest`."""
    if checkpoints_of(path).is_dir():
        return checkpoints_of(path)
    return path.parent if path.name == LATEST else path


def meant_runs(path: Path) -> list[Path]:
    """Up to three run folders that a path which is none may mean, the nearest first.

    Those inside it, else those of a near name beside it or in `runs`.
    """
    if path.is_dir():
        return _runs_in(path)[:3]
    near = {run.name: run for folder in (path.parent, _RUNS) for run in _runs_in(folder)}
    return [near[name] for name in get_close_matches(path.name, near)]


def _runs_in(folder: Path) -> list[Path]:
    try:
        return [one for one in sorted(folder.iterdir()) if (one / "metrics.jsonl").is_file()]
    except OSError:  # no folder, or one that may not be read
        return []
