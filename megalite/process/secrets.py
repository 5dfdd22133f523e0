"""Keys and tokens of the environment, and a text without them.

megalite records no environment; but a library's error may quote a key, in an address for example.
So what is printed or written goes through `Redaction`. It reads values only to leave them out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "[hidden]"

# WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY, ...
_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
_MIN_LENGTH = 8  # a shorter value would be hidden inside words that are none of it


class Redaction:
    """Replaces the values of secret variables in texts."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        found = {
            value
            for name, value in (os.environ if environment is None else environment).items()
            if _SECRET_NAME.search(name.upper()) and len(value) >= _MIN_LENGTH
        }
        longest_first = sorted(found, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if found else None

    def __call__(self, text: str) -> str:
        """`text` with every secret value left out."""
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)
