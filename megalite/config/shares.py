"""Shares of a token stream for training, validation and test, and of the sources of a blend.

A split is a list of two or three numbers, or Megatron's text form: [0.98, 0.02], "98,2",
"969,30,1". Its shares are relative; but where all are at most 1 and one is a fraction they must add
up to 1, since any other sum is a mistake. Exact arithmetic throughout. Knows no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, isfinite, lcm

MAX_PARTS = 1 << 16  # of a blend: weights that need more are rounded
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


def blend_parts(weights: Sequence[Fraction | int]) -> list[int]:
    """The weights of a blend as whole numbers without a common factor.

    They are exact if they add up to MAX_PARTS at most; otherwise MAX_PARTS are apportioned, and a
    share differs from its weight's by less than 1 / MAX_PARTS.
    """
    denominator = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * denominator) for weight in weights]
    if sum(parts) > MAX_PARTS * gcd(*parts):
        parts = apportion(parts, MAX_PARTS)
    return [part // gcd(*parts) for part in parts]


def blend_is_exact(weights: Sequence[Fraction]) -> bool:
    """True if `blend_parts` rounds none of the weights."""
    parts, total = blend_parts(weights), sum(weights)
    whole = sum(parts)
    return all(w * whole == part * total for w, part in zip(weights, parts, strict=True))


def apportion(weights: Sequence[Fraction | int], whole: int) -> list[int]:
    """Whole numbers of sum `whole` by weight, each within one of its exact share.

    By largest remainders: shares are rounded down, and what is left goes to those that lost most
    (of equals the first).
    """
    total = sum(weights)
    counts = [int(whole * weight // total) for weight in weights]
    lost = [whole * weight % total for weight in weights]
    by_loss = sorted(range(len(weights)), key=lambda number: -lost[number])
    for number in by_loss[: whole - sum(counts)]:
        counts[number] += 1
    return counts


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
