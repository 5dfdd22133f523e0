"""metrics.jsonl, the record of a run: one JSON object a line, full precision, nothing rewritten.

Kinds: `run` (first line) and `restart` (first line of a later attempt): resolved config, versions,
git commit, hardware with its peak, parameters, training FLOPs per token by term; `step`, `eval`,
`checkpoint`, `skip`, `end`. Every line carries `attempt`, from 1: after a rollback the steps of
both attempts stay, told apart by it.

A `step` line has `step`, `loss`, `grad_norm` (of the whole model, before clipping), `lr`,
`step_time_s`, `tokens`, `loss_tokens`, `tokens_per_s_per_gpu`, `model_tflops_per_gpu`, `mfu`,
`mfu_causal` (null on a device without a known peak), `memory_peak_bytes`, `global_batch`,
`consumed_samples`, `consumed_tokens`, with train.z_loss `z_loss` (not part of `loss`), and the
time split `time_{compute,tp_comm,pp_wait,dp_comm,data,optimizer,other}_s`. With
`log.param_stats_interval` some have `grad_norms` and `param_stats`, too (see param_stats.py).

A `skip` line has `step`, `reason` ("non-finite gradients", "loss spike") and `count`, the steps
that were skipped for this reason so far. A `restart` line has `changed`: settings that differ from
the checkpoint's, old and new, and whether `--accept` let them pass.

Readers take a file as it is: damaged lines are left out and counted. Knows no torch.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from megalite.errors import ConfigError, MegaliteError
from megalite.process.secrets import Redaction

TIME_PARTS = ("compute", "tp_comm", "pp_wait", "dp_comm", "data", "optimizer", "other")

_RESTARTS = ("run", "restart")
_COUNTS = ("attempt", "step", "tokens", "consumed_tokens", "parameters", "memory_peak_bytes")
_NUMBERS = ("loss", "grad_norm", "lr", "step_time_s", "mfu", "mfu_causal", "seconds")
_NEEDED = {"step": ("step", "loss"), "eval": ("step", "loss"), "restart": ("step",)}


@dataclass
class Lines:
    """The sound lines of a metrics.jsonl, oldest first, and the numbers of the others."""

    sound: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)  # line numbers, from 1

    def damage(self) -> str | None:
        """The damage in a sentence, or None."""
        if not self.damaged:
            return None
        one = len(self.damaged) == 1
        count = "1 line" if one else f"{len(self.damaged)} lines"
        shown = ", ".join(str(number) for number in self.damaged[:5])
        more = ", ..." if len(self.damaged) > 5 else ""
        return (
            f"{count} of metrics.jsonl cannot be used and {'is' if one else 'are'} left out: "
            f"line {shown}{more}"
        )


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
        self.attempt = 1 + max(attempts, default=0)
        self._hide = Redaction()
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Append one line and flush it; numbers that JSON cannot say (nan, inf) become strings."""
        line = {"kind": kind, "attempt": self.attempt, **values}
        try:
            self._file.write(json.dumps(plain(line, self._hide), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise MegaliteError(
                f"{self.path} cannot be written: {error.strerror}; make room and start the run "
                "again, it goes on from its newest checkpoint"
            ) from error

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All sound lines of a metrics.jsonl, oldest first; damaged ones are left out."""
    return read_lines(path).sound


def read_lines(path: Path) -> Lines:
    """A metrics.jsonl as it is: lines cut by a crash, or whose values are of another kind than
    their names say, are told by number. No file: no lines.
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
    """A line's record; None for one that is empty or cut."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _is_sound(record: dict[str, Any]) -> bool:
    """Whether the values that readers count on are there and of their kind."""
    kind = record["kind"]
    needed = _NEEDED.get(kind, ())
    if any(record.get(name) is None for name in needed):
        return False
    if kind in _RESTARTS and not isinstance(record.get("config", {}), dict):
        return False
    times = [name for name in record if name.startswith("time_")]
    return all(_is_count(record[n]) for n in _COUNTS if record.get(n) is not None) and all(
        _is_number(record[n]) for n in (*_NUMBERS, *times) if record.get(n) is not None
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    """A number, or what a number that JSON cannot say was written as."""
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


def plain(value: Any, hide: Callable[[str], str] = str) -> Any:
    """A value as JSON can say it: numbers that are not finite as "nan", "inf" or "-inf"; texts
    as `hide` leaves them.
    """
    if isinstance(value, dict):
        return {key: plain(item, hide) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, hide) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return hide(value) if isinstance(value, str) else value
