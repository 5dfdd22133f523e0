"""The errors a user can meet. Each message says what, got, allowed, and what to change.

Only the command line catches them (it prints the message without a traceback and exits 2);
everything below raises and lets them pass.
"""

from __future__ import annotations


class MegaliteError(Exception):
    """Base of every error that is the user's to fix, not ours."""


class ConfigError(MegaliteError):
    """A setting, or a combination of settings, that cannot run.

    `problems` holds one line per problem, so that all of them can be fixed in one go.
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(MegaliteError):
    """A corpus, tokenizer or indexed dataset that cannot be used as asked."""


class CheckpointError(MegaliteError):
    """A checkpoint that is missing, damaged, or does not belong to this run."""


class ScheduleError(MegaliteError):
    """A pipeline schedule that is not valid: names rank, index and action.

    `position`: that rank and index, where one action is at fault.
    """

    position: tuple[int, int] | None = None


class PlanError(MegaliteError):
    """A plan that cannot be made from what was given."""
