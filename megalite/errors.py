"""Errors that the user can fix. A message has the value, the allowed ones, and what to change.

They are caught where a process ends: by the command line and by a rank (train/rank.py), which print
the message without a traceback and exit with code 2. Everything below raises and lets them pass.
"""

from __future__ import annotations


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


class PlanError(MegaliteError):
    """A plan that cannot be made from the given settings."""


def exit_code(error: BaseException) -> int:
    """Exit code of a process that ends by `error`: 2 if the user can fix it, 1 otherwise."""
    return 2 if isinstance(error, MegaliteError) else 1
