"""The colours that pictures share: apart for every reader, with text that can be read on them."""

from __future__ import annotations

from itertools import combinations

import pytest

from megalite.schedules import build
from megalite.schedules.action import COMPUTE, Action
from megalite.schedules.view.style import STYLES, colour, legend, text_colour

# Linear RGB as readers without one kind of cone see it (Machado, Oliveira and Fernandes 2009).
SEEN = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no medium": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no short": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
LUMINANCE = (0.2126, 0.7152, 0.0722)


def linear(fill: str) -> list[float]:
    shares = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]


def lab(rgb: list[float]) -> list[float]:
    """CIE L*a*b*, in which just visible differences are about 2."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        max(sum(a * b for a, b in zip(row, rgb, strict=True)), 0.0) / w
        for row, w in zip(to_xyz, white, strict=True)
    )
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)]


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("shade", range(4))
def test_kinds_of_one_chunk_are_told_apart_by_all_eyes(eyes: str, shade: int) -> None:
    seen = {}
    for kind, style in STYLES.items():
        rgb = linear(style.shades[shade])
        mixed = [sum(a * b for a, b in zip(row, rgb, strict=True)) for row in SEEN[eyes]]
        seen[kind] = lab([min(max(x, 0.0), 1.0) for x in mixed])
    for one, other in combinations(seen, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        assert distance > 9, (one, other, distance)


def test_a_label_is_read_on_every_fill() -> None:
    """By the contrast that accessibility guidelines ask for."""
    for fill in (shade for style in STYLES.values() for shade in style.shades):
        light = 0.05 + sum(a * b for a, b in zip(LUMINANCE, linear(fill), strict=True))
        contrast = light / 0.05 if text_colour(fill) == "black" else 1.05 / light
        assert contrast > 4.5, (fill, contrast)


def test_every_kind_has_a_style_and_chunks_have_shades() -> None:
    assert STYLES.keys() == COMPUTE
    assert len({style.letter for style in STYLES.values()}) == len(STYLES)
    lone, many = build("1f1b", 2, 1, 2), build("interleaved", 2, 6, 2)
    assert legend(lone)[0] == ("forward (F)", (STYLES["F"].shades[1],))
    assert legend(many)[0] == ("forward (F)", STYLES["F"].shades)
    assert colour(Action("F", 0, 0), lone) == STYLES["F"].shades[1]
    shades = [colour(Action("F", 2 * chunk, 0), many) for chunk in range(6)]
    assert shades == [*STYLES["F"].shades, STYLES["F"].shades[3], STYLES["F"].shades[3]]
