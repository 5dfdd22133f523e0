"""The schedules by name, and what each of them promises.

A name is one of `NAMES`, or a member of the family with its own parameters, such as
"family:f=1.5,lag=1,group=4". `build` is the only way from a name to a schedule; the config, the
command line, the tuner and the runtime all use it.
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
class Kind:
    """A named schedule.

    v: chunks per rank it is defined for, None any number, 2 exactly two, (2,) two or more.
    bubble: idle time a rank at c = 0 for m >= 2p, in F, B, W of a whole rank. memory: most
    activations of a rank, in whole-rank activations of one microbatch. Both are in plain text.
    """

    name: str
    v: str
    summary: str
    bubble: str
    memory: str
    make: Builder
    split: bool = False  # input and weight gradients are separate actions
    v_shaped: bool = False  # chunk 1 of rank r is stage 2p - 1 - r

    def allows(self, v: int) -> bool:
        """Whether the schedule is defined for v chunks per rank."""
        return {"any": True, "1": v == 1, "2": v == 2, ">= 2": v >= 2}[self.v]


def _kinds() -> tuple[Kind, ...]:
    whole, early = "(p-1)(F+B+W)", "(p-1)(F+B)"
    zero = "(p-1) max(F, B, F+B-W)"
    return (
        Kind(
            "gpipe",
            "any",
            "all forwards, then all backwards; breadth-first over chunks",
            f"{whole}/v",
            "m",
            breadth_first,
        ),
        Kind(
            "1f1b",
            "1",
            "one forward, one backward",
            whole,
            "p",
            lambda p, v, m: fuse(family(p, 1, m)),
        ),
        Kind(
            "1f1b-early",
            "1",
            "1f1b that sends the input gradient before it computes the weight gradient",
            early,
            "p",
            lambda p, v, m: family(p, 1, m),
            split=True,
        ),
        Kind(
            "eager-1f1b",
            "1",
            "1f1b with twice the warm-up: hides slow hops for twice the memory",
            whole,
            "2p-1",
            lambda p, v, m: fuse(family(p, 1, m, f=2.0)),
        ),
        Kind(
            "interleaved",
            ">= 2",
            "interleaved 1f1b with Megatron's warm-up",
            f"{whole}/v",
            "p+(p-1)/v",
            lambda p, v, m: fuse(family(p, v, m, f=2.0)),
        ),
        Kind(
            "interleaved-early",
            ">= 2",
            "interleaved with early input gradients and half the warm-up",
            f"{early}/v",
            "p",
            lambda p, v, m: family(p, v, m),
            split=True,
        ),
        Kind(
            "zb-h1",
            "1",
            "zero bubble at the memory of 1f1b: weight gradients fill the cool-down",
            zero,
            "p",
            lambda p, v, m: family(p, 1, m, lag=1.0),
            split=True,
        ),
        Kind(
            "zb-h2",
            "1",
            "zero span bubble for twice the memory",
            "(p-1) max(F, B-F, F+B-2W)",
            "2p-1",
            lambda p, v, m: family(p, 1, m, f=2.0, lag=2.0),
            split=True,
        ),
        Kind(
            "interleaved-zb",
            ">= 2",
            "interleaved zero bubble: the best at the memory of 1f1b where hops are cheap",
            f"{zero}/v",
            "p",
            lambda p, v, m: family(p, v, m, lag=1.0),
            split=True,
        ),
        Kind(
            "zb-v",
            "2",
            "zero bubble on the V placement: embedding and head share a rank",
            "about (p-1)F/2",
            "p",
            lambda p, v, m: zero_bubble_v(p, m),
            split=True,
            v_shaped=True,
        ),
        Kind(
            "dualpipe-v",
            "2",
            "DualPipe cut in half, run in sequence; needs m >= 2p",
            "about (p-1)F/2",
            "p+1/2",
            lambda p, v, m: dualpipe_v(p, m),
            split=True,
            v_shaped=True,
        ),
        Kind(
            "v-half",
            "2",
            "half the memory of 1f1b",
            "about 1.8(p-1)F",
            "p/2+1",
            lambda p, v, m: controllable(p, m, minimum=False),
            split=True,
            v_shaped=True,
        ),
        Kind(
            "v-min",
            "2",
            "a third of the memory of 1f1b; needs quick hops and even stages",
            "about 2(p-1)F",
            "p/3+1",
            lambda p, v, m: controllable(p, m, minimum=True),
            split=True,
            v_shaped=True,
        ),
    )


KINDS = {kind.name: kind for kind in _kinds()}
NAMES = tuple(KINDS)


def build(name: str, p: int, v: int, m: int) -> Schedule:
    """The schedule of a name: compute actions for p ranks with v chunks each and m microbatches.

    Raises ScheduleError for an unknown name, a v that the name does not go with, and parameters of
    a family member that deadlock or mean nothing.
    """
    if name.partition(":")[0] == FAMILY:
        return _family_member(name, p, v, m)
    kind = find(name)
    if not kind.allows(v):
        others = ", ".join(other.name for other in KINDS.values() if other.allows(v))
        raise ScheduleError(
            f"{name} needs v {kind.v if kind.v[0] == '>' else '= ' + kind.v} chunks per rank, got "
            f"v={v}; with v={v} use one of {others}"
        )
    return kind.make(p, v, m)


def find(name: str) -> Kind:
    """The kind of a name; ScheduleError with the nearest name and all others for an unknown one."""
    if name in KINDS:
        return KINDS[name]
    near = get_close_matches(name.lower(), NAMES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ScheduleError(
        f"schedule {name!r} is unknown{hint}; use one of {', '.join(NAMES)}, a member such as "
        f'"{FAMILY}:f=1,lag=1" or a file as "file:my.csv"'
    )


def family_name(f: float, lag: float, group: int | None = None, *, fused: bool = False) -> str:
    """The name that `build` reads back as this member of the family."""
    parts = [f"f={f:g}", f"lag={lag:g}", *([f"group={group}"] if group else [])]
    return f"{FAMILY}:{','.join([*parts, *(['fused'] if fused else [])])}"


def _family_member(name: str, p: int, v: int, m: int) -> Schedule:
    values: dict[str, float] = {}
    words = [word.strip() for word in name.partition(":")[2].split(",") if word.strip()]
    for word in words:
        key, _, text = word.partition("=")
        if word == "fused":
            continue
        try:
            values[key] = float(text)
        except ValueError:
            values["?"] = 0.0
    group = values.pop("group", None)
    whole = group is None or group == int(group)
    if not whole or not values.keys() <= {"f", "lag"}:
        raise ScheduleError(
            f"{name!r} is no member of the family; write {FAMILY}:f=NUMBER,lag=NUMBER with "
            "group=COUNT and fused as you need them"
        )
    schedule = family(p, v, m, **values, group=None if group is None else int(group))
    return fuse(schedule) if "fused" in words else schedule
