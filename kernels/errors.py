"""The error for a backend or an adapter that cannot be used."""

from __future__ import annotations


class BackendError(ValueError):
    """A backend or an adapter that was asked for cannot be used.

    The message names what was asked for, what was found, what is allowed, and what to change or to
    install. The trainer turns it into a ConfigError, which this package does not know.
    """
