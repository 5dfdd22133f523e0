"""The error of a backend or an adapter that was asked for and cannot be had."""

from __future__ import annotations


class BackendError(ValueError):
    """What was asked for, what there is, what is allowed and what to change or to install.

    The trainer turns it into a ConfigError; this package knows no settings.
    """
