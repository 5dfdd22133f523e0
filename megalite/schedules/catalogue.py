"""The schedules by name, with their bubble and memory.

A name is one of `NAMES`, or a member of the family with its own parameters, such as
"family:f=1.5,lag=1,group=4". `build` is the only way from a name to a schedule; the config, the
command line, the tuner and the runtime all use it. A new schedule is a builder and a row of
`_TABLE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from megalite.errors import ScheduleError
from megalite.schedules.action import Schedule
from megalite.schedules.builders import breadth_first, family, fuse
from megalite.schedules.v_shape import controllable, dualpipe_v, zero_bubble_v

FAMILY = "family"

Builder = Callable[[int, int, int], Schedule]  # p, v, m


@dataclass(frozen=True)
class ChunkCounts:
    """The numbers of chunks per rank that a schedule is defined for."""

    minimum: int = 1
    maximum: int | None = None  # None: no limit

    def allows(self, vpp: int) -> bool:
        """True if the schedule is defined for `vpp` chunks per rank."""
        return vpp >= self.minimum and (self.maximum is None or vpp <= self.maximum)

    @property
    def text(self) -> str:
        """The numbers in tables and messages: "any", "2", ">= 2" or "2 to 4"."""
        if self.maximum is None:
            return "any" if self.minimum == 1 else f">= {self.minimum}"
        if self.maximum == self.minimum:
            return str(self.minimum)
        return f"{self.minimum} to {self.maximum}"


@dataclass(frozen=True)
class NamedSchedule:
    """A row of the catalogue.

    bubble: idle time of a rank with free hops and m >= 2p, in F, B, W: the times of a whole rank.
    memory: most activations of a rank, in whole-rank activations of one microbatch. Both are
    formulas in plain text, in p ranks, v chunks per rank and m microbatches.
    """

    name: str
    chunks: ChunkCounts
    summary: str
    bubble: str
    memory: str
    make: Builder
    v_shaped: bool = False  # chunk 1 of rank r is stage 2p - 1 - r


_ANY = ChunkCounts()
_ONE = ChunkCounts(1, 1)
_TWO = ChunkCounts(2, 2)
_SEVERAL = ChunkCounts(2)

# Bubbles at one chunk per rank: of 1f1b, with early input gradients, and with weight gradients that
# are deferred into the cool-down.
_FULL_BUBBLE = "(p-1)(F+B+W)"
_EARLY_BUBBLE = "(p-1)(F+B)"
_ZERO_BUBBLE = "(p-1) max(F, B, F+B-W)"

_TABLE = (
    NamedSchedule(
        name="gpipe",
        chunks=_ANY,
        summary="all forwards, then all backwards; breadth-first over chunks",
        bubble=f"{_FULL_BUBBLE}/v",
        memory="m",
        make=breadth_first,
    ),
    NamedSchedule(
        name="1f1b",
        chunks=_ONE,
        summary="one forward, one backward",
        bubble=_FULL_BUBBLE,
        memory="p",
        make=lambda p, v, m: fuse(family(p, 1, m)),
    ),
    NamedSchedule(
        name="1f1b-early",
        chunks=_ONE,
        summary="1f1b that sends the input gradient before it computes the weight gradient",
        bubble=_EARLY_BUBBLE,
        memory="p",
        make=lambda p, v, m: family(p, 1, m),
    ),
    NamedSchedule(
        name="eager-1f1b",
        chunks=_ONE,
        summary="1f1b with twice the warm-up: hides slow hops for twice the memory",
        bubble=_FULL_BUBBLE,
        memory="2p-1",
        make=lambda p, v, m: fuse(family(p, 1, m, f=2.0)),
    ),
    NamedSchedule(
        name="interleaved",
        chunks=_SEVERAL,
        summary="interleaved 1f1b with Megatron's warm-up",
        bubble=f"{_FULL_BUBBLE}/v",
        memory="p+(p-1)/v",
        make=lambda p, v, m: fuse(family(p, v, m, f=2.0)),
    ),
    NamedSchedule(
        name="interleaved-early",
        chunks=_SEVERAL,
        summary="interleaved with early input gradients and half the warm-up",
        bubble=f"{_EARLY_BUBBLE}/v",
        memory="p",
        make=lambda p, v, m: family(p, v, m),
    ),
    NamedSchedule(
        name="zb-h1",
        chunks=_ONE,
        summary="zero bubble at the memory of 1f1b: weight gradients fill the cool-down",
        bubble=_ZERO_BUBBLE,
        memory="p",
        make=lambda p, v, m: family(p, 1, m, lag=1.0),
    ),
    NamedSchedule(
        name="zb-h2",
        chunks=_ONE,
        summary="zero span bubble for twice the memory",
        bubble="(p-1) max(F, B-F, F+B-2W)",
        memory="2p-1",
        make=lambda p, v, m: family(p, 1, m, f=2.0, lag=2.0),
    ),
    NamedSchedule(
        name="interleaved-zb",
        chunks=_SEVERAL,
        summary="interleaved zero bubble: the best at the memory of 1f1b where hops are cheap",
        bubble=f"{_ZERO_BUBBLE}/v",
        memory="p",
        make=lambda p, v, m: family(p, v, m, lag=1.0),
    ),
    NamedSchedule(
        name="zb-v",
        chunks=_TWO,
        summary="zero bubble on the V placement: embedding and head share a rank",
        bubble="about (p-1)F/2",
        memory="p",
        make=lambda p, v, m: zero_bubble_v(p, m),
        v_shaped=True,
    ),
    NamedSchedule(
        name="dualpipe-v",
        chunks=_TWO,
        summary="DualPipe cut in half, run in sequence; needs m >= 2p",
        bubble="about (p-1)F/2",
        memory="p+1/2",
        make=lambda p, v, m: dualpipe_v(p, m),
        v_shaped=True,
    ),
    NamedSchedule(
        name="v-half",
        chunks=_TWO,
        summary="half the memory of 1f1b",
        bubble="about 1.8(p-1)F",
        memory="p/2+1",
        make=lambda p, v, m: controllable(p, m, minimum=False),
        v_shaped=True,
    ),
    NamedSchedule(
        name="v-min",
        chunks=_TWO,
        summary="a third of the memory of 1f1b; needs quick hops and even stages",
        bubble="about 2(p-1)F",
        memory="p/3+1",
        make=lambda p, v, m: controllable(p, m, minimum=True),
        v_shaped=True,
    ),
)

SCHEDULES = {schedule.name: schedule for schedule in _TABLE}
NAMES = tuple(SCHEDULES)


def build(name: str, p: int, v: int, m: int) -> Schedule:
    """The schedule of a name: compute actions for p ranks with v chunks each and m microbatches.

    Raises ScheduleError for an unknown name, a v that the name does not go with, and parameters of
    a family member that deadlock or mean nothing.
    """
    if name.partition(":")[0] == FAMILY:
        return _family_member(name, p, v, m)
    schedule = find_schedule(name)
    chunks = schedule.chunks
    if not chunks.allows(v):
        needed = chunks.text if chunks.maximum is None else f"= {chunks.text}"
        others = ", ".join(other.name for other in SCHEDULES.values() if other.chunks.allows(v))
        raise ScheduleError(
            f"{name} needs v {needed} (chunks per rank), got v={v}; with v={v} use one of {others}"
        )
    return schedule.make(p, v, m)


def find_schedule(name: str) -> NamedSchedule:
    """The row of a name. Raises ScheduleError with the nearest name and all others."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = get_close_matches(name.lower(), NAMES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ScheduleError(
        f"schedule {name!r} is unknown{hint}; use one of {', '.join(NAMES)}, a member such as "
        f'"{FAMILY}:f=1,lag=1" or a file as "file:my.csv"'
    )


def family_name(f: float, lag: float, group: int | None = None, *, fused: bool = False) -> str:
    """The name that `build` reads back as this member of the family."""
    parts = [f"f={f:g}", f"lag={lag:g}"]
    if group:
        parts.append(f"group={group}")
    if fused:
        parts.append("fused")
    return f"{FAMILY}:{','.join(parts)}"


def _family_member(name: str, p: int, v: int, m: int) -> Schedule:
    wrong = ScheduleError(
        f"{name!r} is no member of the family; write {FAMILY}:f=NUMBER,lag=NUMBER with "
        "group=COUNT and fused as you need them"
    )
    values: dict[str, float] = {}
    fused = False
    for word in map(str.strip, name.partition(":")[2].split(",")):
        key, _, text = word.partition("=")
        if not word:
            continue
        if word == "fused":
            fused = True
        elif key in ("f", "lag", "group"):
            try:
                values[key] = float(text)
            except ValueError:
                raise wrong from None
        else:
            raise wrong

    # Ranges are checked where the schedule is built; here only that a count is a whole number.
    group = values.pop("group", None)
    if group is not None and not group.is_integer():
        raise wrong
    schedule = family(p, v, m, **values, group=None if group is None else int(group))
    return fuse(schedule) if fused else schedule
