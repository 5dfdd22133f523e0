"""Shares of a token stream for training, validation and test, as users write them.

Accepted are lists of two or three numbers and Megatron's text form: [0.98, 0.02], "98,2",
"969,30,1". Shares are relative; but where all are at most 1 and one is a fraction they must add up
to 1, since any other sum is a mistake. Exact arithmetic throughout. Knows no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

SPLIT_NAMES = ("train", "validation", "test")
EXAMPLES = 'use for example [0.98, 0.02], "98,2" or "969,30,1"'


def parse_split(value: object) -> tuple[float, ...]:
    """Shares of train, validation and, where given, test. Raises ValueError with a remedy."""
    parts = _numbers(value)
    if not 2 <= len(parts) <= len(SPLIT_NAMES):
        raise ValueError(f"needs 2 or 3 numbers (train, validation, test); {EXAMPLES}")
    for name, share in zip(SPLIT_NAMES, parts, strict=False):
        if not isfinite(share) or share < 0:
            raise ValueError(f"has {share:g} as share of {name}, which is no share; {EXAMPLES}")
    total = sum(parts)
    if parts[0] == 0:
        raise ValueError(f"needs a positive train share, got {parts[0]:g}; {EXAMPLES}")
    if max(parts) <= 1 and any(0 < share < 1 for share in parts) and abs(total - 1) > 1e-9:
        added = " + ".join(f"{share:g}" for share in parts)
        raise ValueError(
            f"needs a positive train share and shares that add up to 1, got {added} = {total:g}; "
            f"{EXAMPLES}"
        )
    return parts


def decimal_fraction(number: float) -> Fraction:
    """The number as it is written: 0.1 is a tenth, not the binary fraction nearest to it."""
    return Fraction(repr(number))


def share_bounds(num_tokens: int, shares: Sequence[float]) -> list[int]:
    """First token of each share of `num_tokens` tokens, and the end: len(shares) + 1 numbers."""
    whole = sum(decimal_fraction(share) for share in shares)
    bounds, reached = [0], Fraction(0)
    for share in shares:
        reached += decimal_fraction(share)
        bounds.append(int(num_tokens * reached / whole))
    return bounds


def _numbers(value: object) -> tuple[float, ...]:
    if isinstance(value, str):
        return tuple(_number(part) for part in value.split(","))
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"needs 2 or 3 numbers (train, validation, test); {EXAMPLES}")
    for part in value:
        if isinstance(part, bool) or not isinstance(part, (int, float)):
            raise ValueError(f"has {part!r}, which is no number; {EXAMPLES}")
    return tuple(float(part) for part in value)


def _number(text: str) -> float:
    # float() would also take "1_000", "nan" and spaces within.
    plain = text.strip()
    if not plain or plain.strip("0123456789.eE+-"):
        raise ValueError(f"has {text!r}, which is no number; {EXAMPLES}")
    try:
        return float(plain)
    except ValueError:
        raise ValueError(f"has {text!r}, which is no number; {EXAMPLES}") from None
