"""Errors that the user can fix, and exit codes. A message has the value, what is allowed, a remedy.

Errors are caught where a process ends: by the command line and by a rank (train/rank.py), which
print the message without a traceback. Everything below raises and lets them pass.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXIT_FAULT = 1  # of megalite, or of the machine
EXIT_USER = 2  # something for the user to change
EXIT_INTERRUPTED = 130  # by Ctrl-C, with nothing to continue: 128 + SIGINT
EXIT_SAVED = 75  # EX_TEMPFAIL of sysexits.h: stopped with its work saved, start it again

# What helps against an error in writing a file, by its number.
_REMEDIES = {
    (errno.ENOSPC, errno.EDQUOT): "make room",
    (errno.EACCES, errno.EPERM): "get the right to write there",
    (errno.ENOENT,): "make its folder first",
    (errno.EISDIR,): "name a file in it",
    (errno.EIO, errno.ESTALE, errno.ETIMEDOUT): "see the system's log about the storage",
}


class MegaliteError(Exception):
    """Base of every error that the user can fix; any other exception is a fault of megalite."""


class ConfigError(MegaliteError):
    """A setting, or a combination of settings, that cannot run.

    `problems` holds one line per problem, so that all of them can be fixed in one go.
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(MegaliteError):
    """A corpus, tokenizer or indexed dataset that cannot be used with the given settings."""


class CheckpointError(MegaliteError):
    """A checkpoint that is missing, damaged, or does not belong to this run."""


class ScheduleError(MegaliteError):
    """A pipeline schedule that is not valid; the message names rank, index and action.

    `position`: rank and index of the action, if one action is at fault.
    """

    position: tuple[int, int] | None = None


def all_of(*steps: Callable[[], Any]) -> list[Any]:
    """Results of steps that do not depend on each other.

    Raises ConfigError with the problems of all steps that raise one.
    """
    results, problems = [], []
    for step in steps:
        try:
            results.append(step())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return results


def exit_code(error: BaseException) -> int:
    """Exit code of a process that ends by `error`."""
    return EXIT_USER if isinstance(error, MegaliteError) else EXIT_FAULT


def cannot_write(path: str | Path, error: OSError, elsewhere: str = "") -> str:
    """The message for a file that cannot be written, with a remedy by the error's number.

    `elsewhere`: how the user can have it at another place, such as "change out or name".
    """
    by_number = next((text for numbers, text in _REMEDIES.items() if error.errno in numbers), "")
    remedies = " or ".join(filter(None, (by_number, elsewhere)))
    return f"{path} cannot be written: {error.strerror}" + (f"; {remedies}" if remedies else "")
