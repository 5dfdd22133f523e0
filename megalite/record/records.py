"""metrics.jsonl, the record of a run: one JSON object a line, full precision, nothing rewritten.

Kinds: `run` (first line) and `restart` (first line of a later attempt): resolved config, versions,
git commit, hardware with its peak, parameters, training FLOPs per token by term; `step`, `eval`,
`checkpoint`, `skip`, `end`. Every line has `attempt`, from 1: after a rollback the steps of both
attempts stay, distinguished by it.

docs/metrics.md has every name; `run_record.py` makes the lines.

A `skip` line has `step`, `reason` ("non-finite gradients", "loss spike") and `count`, the steps
that were skipped for this reason so far. A `restart` line has `changed`: settings that differ from
the checkpoint's, old and new, and whether `--accept` let them pass.

Readers accept a damaged file: lines that cannot be used are left out and counted. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from megalite.errors import ConfigError, MegaliteError, cannot_write
from megalite.process.locks import lock_file
from megalite.process.secrets import Redaction
from megalite.wording import number_of

TIME_PARTS = ("compute", "tp_comm", "pp_wait", "dp_comm", "data", "optimizer", "other")

# The values that readers rely on: kinds of line with a config, names of whole numbers, names of
# numbers, names that a kind of line must have.
_RESTARTS = ("run", "restart")
_COUNTS = ("attempt", "step", "tokens", "consumed_tokens", "parameters", "memory_peak_bytes")
_NUMBERS = ("loss", "grad_norm", "lr", "step_time_s", "mfu", "mfu_causal", "seconds")
_NEEDED = {"step": ("step", "loss"), "eval": ("step", "loss"), "restart": ("step",)}


@dataclass
class Lines:
    """The sound lines of a metrics.jsonl, oldest first, and the line numbers of damaged ones."""

    sound: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)  # line numbers, from 1

    def damage(self) -> str | None:
        """A sentence about the damaged lines; None if there are none."""
        if not self.damaged:
            return None
        subject = (
            f"{number_of(len(self.damaged), 'line')} of metrics.jsonl cannot be used and "
            f"{'is' if len(self.damaged) == 1 else 'are'} left out"
        )
        shown = ", ".join(str(number) for number in self.damaged[:5])
        more = ", ..." if len(self.damaged) > 5 else ""
        return f"{subject}: line {shown}{more}"


def lock_folder(folder: Path, warn: Callable[[str], object]) -> TextIO:
    """Lock a run folder until the returned file is closed or this process ends.

    Raises ConfigError if another process has locked it: two runs would mix their records and delete
    each other's unfinished checkpoints. Without locks in the file system there is a warning.
    """
    try:
        return lock_file(folder / "lock", warn)
    except BlockingIOError:
        raise ConfigError(
            f"{folder} is in use by another run; give this one another name, or wait for its end"
        ) from None


class MetricsFile:
    """Appends lines to a run's metrics.jsonl. `attempt` numbers the processes that did, from 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair_last_line(path)
        attempts = [line.get("attempt", 1) for line in read_metrics(path)]
        self.attempt = 1 + max(attempts, default=0)
        self._hide = Redaction()
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Append one line and flush it; numbers that JSON lacks (nan, inf) become strings.

        Raises MegaliteError if the file cannot be written.
        """
        line = {"kind": kind, "attempt": self.attempt, **values}
        try:
            self._file.write(json.dumps(plain(line, self._hide), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise MegaliteError(
                f"{cannot_write(self.path, error)}; then start the run again, it goes on from its "
                "newest checkpoint"
            ) from error

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All sound lines of a metrics.jsonl, oldest first; damaged ones are left out."""
    return read_lines(path).sound


def read_lines(path: Path) -> Lines:
    """The lines of a metrics.jsonl; none if there is no file.

    Damaged are lines cut by a crash and lines with a value of another type than its name requires.
    """
    lines = Lines()
    if not path.is_file():
        return lines
    for number, text in enumerate(_texts(path), start=1):
        record = _parse(text)
        if record is not None and _is_sound(record):
            lines.sound.append(record)
        elif text.strip():
            lines.damaged.append(number)
    return lines


def _texts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's record; None for a line that is empty or cut."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _is_sound(record: dict[str, Any]) -> bool:
    """True if the values that readers rely on exist and have their type."""
    kind = record["kind"]
    needed = _NEEDED.get(kind, ())
    if any(record.get(name) is None for name in needed):
        return False
    if kind in _RESTARTS and not isinstance(record.get("config", {}), dict):
        return False
    times = [name for name in record if name.startswith("time_")]
    counts = [record[name] for name in _COUNTS if record.get(name) is not None]
    numbers = [record[name] for name in (*_NUMBERS, *times) if record.get(name) is not None]
    return all(map(_is_count, counts)) and all(map(_is_number, numbers))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    """True for a number, also one that JSON lacks and `plain` has written as a string."""
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _repair_last_line(path: Path) -> None:
    """Remove a last line that a crash cut; if it lacks only the line end, append that."""
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


def plain(value: Any, hide: Callable[[str], str] = str) -> Any:
    """A value that JSON can express: numbers that are not finite become "nan", "inf" or "-inf".

    Strings go through `hide`.
    """
    if isinstance(value, dict):
        return {key: plain(item, hide) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, hide) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return hide(value) if isinstance(value, str) else value
