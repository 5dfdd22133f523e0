"""metrics.jsonl, the record of a run: one JSON object a line, full precision, nothing rewritten.

A run that was resumed appends; lines of a later attempt carry a higher `attempt`. Knows no torch.
"""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path
from typing import Any, TextIO

from megalite.errors import ConfigError, MegaliteError

TIME_PARTS = ("compute", "tp_comm", "pp_wait", "dp_comm", "data", "optimizer", "other")


def lock_folder(folder: Path) -> TextIO:
    """Hold a run folder until the result is closed or this process ends.

    ConfigError if another process holds it: two runs would mix their records and delete each
    other's unfinished checkpoints.
    """
    file = (folder / "lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{folder} is in use by another run; give this one another name, or wait for its end"
        ) from None
    return file


class MetricsFile:
    """Appends to a run's metrics.jsonl. Lines carry `attempt`, counted from 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair_last_line(path)
        attempts = [line.get("attempt", 1) for line in read_metrics(path)]
        self.attempt = 1 + max((a for a in attempts if isinstance(a, int)), default=0)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Append one line and flush it; numbers that JSON cannot say (nan, inf) become strings."""
        line = {"kind": kind, "attempt": self.attempt, **values}
        try:
            self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise MegaliteError(
                f"{self.path} cannot be written: {error.strerror}; make room and start the run "
                "again, it goes on from its newest checkpoint"
            ) from error

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, oldest first; lines cut by a crash are left out."""
    if not path.is_file():
        return []
    lines = (_parse(line) for line in path.read_bytes().split(b"\n"))
    return [line for line in lines if line is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's record; None for one that is empty or cut."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def _repair_last_line(path: Path) -> None:
    """Remove a line that a crash cut, or end it if only its end is missing."""
    content = path.read_bytes() if path.is_file() else b""
    whole, newline, last = content.rpartition(b"\n")
    if not last:
        return
    with path.open("rb+") as file:
        if _parse(last) is None:
            file.truncate(len(whole + newline))
        else:
            file.seek(0, 2)
            file.write(b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
