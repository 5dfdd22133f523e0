"""Removing the keys and tokens of the environment from texts.

megalite records no environment variables, but a library's error may quote a key, in an address for
example. So whatever is printed or written goes through `Redaction`. It reads the values of secret
variables only to remove them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "[hidden]"

# WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY, ...
_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
_MIN_LENGTH = 8  # characters; a shorter value may be part of ordinary words


class Redaction:
    """A function of texts that replaces the values of secret environment variables by `HIDDEN`."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        found = {
            value
            for name, value in (os.environ if environment is None else environment).items()
            if _SECRET_NAME.search(name.upper()) and len(value) >= _MIN_LENGTH
        }
        # A value may contain another: the longer one must match first, or its rest would stay.
        longest_first = sorted(found, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if found else None

    def __call__(self, text: str) -> str:
        """`text` with every secret value replaced."""
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)
