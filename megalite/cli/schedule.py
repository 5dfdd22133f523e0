"""`megalite schedule`: draw, compare and write pipeline schedules, without torch.

Reading order: `schedule` (the options), then where schedules come from (`_build`, `_show_config`,
`_show_run`), then what is shown of them (`_show`, `_comparison`, `_write_files`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.options import file
from megalite.errors import ScheduleError
from megalite.schedules import Durations, Schedule, Timeline, build, recompute, simulate
from megalite.schedules.action import BACKWARD
from megalite.schedules.catalogue import FAMILY, SCHEDULES
from megalite.schedules.check import check_schedule
from megalite.schedules.csv_form import FILE, read_file, write_csv
from megalite.schedules.memory import peak_deferred
from megalite.schedules.tune import AUTO, default_name, peak_activations, tune
from megalite.schedules.view.draw_text import Cell, draw_text, plain
from megalite.schedules.view.trace import chrome_trace, read_trace

# Terminal colours by kind of action (rich's names).
_STYLES = {"F": "blue", "B": "green", "W": "yellow", BACKWARD: "cyan", "R": "bright_black"}


def schedule(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Schedules; auto: the best; file:PATH: a CSV."),
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 4,
    chunks: Annotated[
        int | None, typer.Option(min=1, help="Model chunks per rank; default: 1 or 2 by name.")
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per step.")] = 8,
    f: Annotated[float, typer.Option(min=1e-9, help="Time of a rank's forward.")] = 1.0,
    b: Annotated[float, typer.Option(min=1e-9, help="... of its input gradient.")] = 1.0,
    w: Annotated[float, typer.Option(min=1e-9, help="... of its weight gradient.")] = 1.0,
    comm: Annotated[float, typer.Option(min=0.0, help="Time of a hop between ranks.")] = 0.0,
    memory: Annotated[
        float | None, typer.Option(help="For auto: most activations a rank may hold.")
    ] = None,
    recomputed: Annotated[
        bool, typer.Option("--recompute", help="Run each forward again before its backward.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="A table of all NAMEs.")] = False,
    unit: Annotated[float | None, typer.Option(help="Time of a column of the picture.")] = None,
    svg: Annotated[
        Path | None, typer.Option(parser=file, help="Write the picture to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(parser=file, help="Write it as a page that zooms.")
    ] = None,
    png: Annotated[Path | None, typer.Option(parser=file, help="Write it as a bitmap.")] = None,
    trace: Annotated[
        Path | None, typer.Option(parser=file, help="Write a trace for Perfetto.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(parser=file, help="Write the schedule as a CSV.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="A run's config: its stages, their modelled times, its schedule."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of --config; repeatable."),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(parser=file, help="A run folder: its recorded step beside the simulated one."),
    ] = None,
) -> None:
    """Draw a pipeline schedule, or compare several: bubble, memory, messages."""
    output = _Output(compare, unit, svg, html, png, trace, csv)

    # A run or a config determines sizes and times, so options that would change them are refused.
    if from_run is not None:
        if names or compare or config is not None:
            raise ScheduleError(
                "--from-run shows the schedule of the run; give no NAME and no --config with it"
            )
        return _show_run(from_run, output)
    if config is not None:
        _require_none_of(ctx, "stages", "chunks", "microbatches", "f", "b", "w", "comm")
        _require_none_of(ctx, "memory", "recomputed")
        return _show_config(config, overrides or [], names or [], output)
    if overrides:
        raise ScheduleError("--set changes a setting of --config; give both, or neither")

    if not names and not compare:
        typer.echo(_catalogue())
        return
    sizes = _Sizes(stages, chunks, microbatches, f, b, w, comm, memory, recomputed)
    compared = names or [
        one.name for one in SCHEDULES.values() if chunks is None or one.chunks.allows(chunks)
    ]
    _show([_build(name, sizes) for name in compared], output)


@dataclass(frozen=True)
class _Sizes:
    """Sizes, times and limits with which schedules of given names are built.

    Times are those of a whole rank, in any unit; `hop` is the time of a message between ranks.
    """

    p: int  # pipeline ranks
    v: int | None  # chunks per rank; None: by name
    m: int  # microbatches
    f: float
    b: float
    w: float
    hop: float
    max_activations: float | None  # for auto
    recompute: bool


@dataclass(frozen=True)
class _Output:
    """The form in which schedules are shown, and the files that a single one is written to."""

    compare: bool  # a table instead of pictures
    unit: float | None  # time of a column of the picture
    svg: Path | None
    html: Path | None
    png: Path | None
    trace: Path | None
    csv: Path | None

    @property
    def has_files(self) -> bool:
        """True if any file is to be written."""
        files = (self.svg, self.html, self.png, self.trace, self.csv)
        return any(path is not None for path in files)


@dataclass(frozen=True)
class _Simulated:
    """A schedule with its simulated time line, and its measured one where there is a record."""

    name: str
    schedule: Schedule
    timeline: Timeline
    measured: Timeline | None = None

    @property
    def title(self) -> str:
        """The line above the picture."""
        s, line = self.schedule, self.timeline
        return (
            f"{self.name}: {s.p} ranks x {s.v} chunks, {s.m} microbatches; step "
            f"{line.makespan:.4g}, bubble {line.bubble_fraction:.1%}, at most "
            f"{peak_activations(s):g} activations a rank"
        )

    @property
    def num_messages(self) -> int:
        """Messages of a step: one each way per microbatch between stages on different ranks."""
        crossings = sum(a != b for a, b in pairwise(self.schedule.place))
        return 2 * self.schedule.m * crossings


def _require_none_of(ctx: typer.Context, *options: str) -> None:
    for option in options:
        source = ctx.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            flag = {"recomputed": "recompute"}.get(option, option)
            raise ScheduleError(
                f"--{flag} has no effect with --config, which says it itself; take it out, or "
                "change the config with --set"
            )


def _build(name: str, sizes: _Sizes) -> _Simulated:
    """The schedule of a name at the sizes of the command line, checked and simulated."""
    v = sizes.v
    if v is None:
        v = SCHEDULES[name].chunks.minimum if name in SCHEDULES else 1
    durations = Durations.even(sizes.p, v, f=sizes.f, b=sizes.b, w=sizes.w, hop=sizes.hop)

    # These two stand for a choice among the others; the title shows the one chosen.
    if name == AUTO:
        name = tune(sizes.p, v, sizes.m, durations, sizes.max_activations)[0].name
    if name == "default":
        name = default_name(sizes.p, v, sizes.m)

    if name.startswith(FILE):
        built = read_file(name[len(FILE) :], sizes.p, v, sizes.m)
    else:
        built = build(name, sizes.p, v, sizes.m)
    if sizes.recompute:
        built = recompute(built)
    check_schedule(built)
    return _Simulated(name, built, simulate(built, durations))


def _show_config(path: str, overrides: list[str], names: list[str], output: _Output) -> None:
    """Print the stages and work of a run, then show its schedule, or others in its place."""
    from megalite.cli.schedule_config import plan_of, stage_lines

    plan = plan_of(path, overrides)
    for line in stage_lines(plan):
        typer.echo(line)
    wanted = names or [plan.name]
    if output.compare and not names:
        wanted = [one.name for one in SCHEDULES.values() if one.chunks.allows(plan.v)]

    # Only a comparison of all schedules may leave one out; a name that the user gave must fit.
    shown, left_out = [], []
    for name in wanted:
        try:
            own, durations = plan.schedule(name)
            shown.append(_Simulated(name, own, simulate(own, durations)))
        except ScheduleError as error:
            if names or not output.compare:
                raise
            left_out.append(f"left out: {error}")
    for line in left_out:
        typer.echo(line)
    _show(shown, output)


def _show_run(run: Path, output: _Output) -> None:
    """Show the recorded step of a run beside a simulation of it with the same durations."""
    record = read_trace(run)
    simulated = simulate(record.schedule, record.durations())
    one = _Simulated(record.name, record.schedule, simulated, record.timeline)
    took, ideal = record.timeline.makespan, simulated.makespan
    typer.echo(
        f"{record.name}, step {record.step}: measured {took * 1e3:.1f} ms, simulated with the "
        f"median durations of its actions {ideal * 1e3:.1f} ms, ratio {ideal / took:.3f}"
    )
    if not output.has_files:
        column = output.unit if output.unit is not None else took / 100
        for title, line in (("simulated", simulated), ("measured", record.timeline)):
            typer.echo(f"{title} (a column is {column * 1e3:.3g} ms)")
            _print_picture(one.schedule, line, column)
    _write_files(one, output)


def _show(schedules: list[_Simulated], output: _Output) -> None:
    """Print a table of several schedules, or the picture of one, or write its files."""
    if output.compare or len(schedules) > 1:
        for line in _comparison(schedules):
            typer.echo(line)
    if len(schedules) != 1:
        if output.has_files:
            raise ScheduleError("files are written for one schedule at a time; give one NAME")
        return
    one = schedules[0]
    if not output.compare and not output.has_files:
        typer.echo(one.title)
        _print_picture(one.schedule, one.timeline, output.unit)
    _write_files(one, output)


def _catalogue() -> str:
    lines = ["schedule           chunks  bubble                     memory     what it is"]
    for one in SCHEDULES.values():
        lines.append(
            f"{one.name:<18} {one.chunks.text:>6}  {one.bubble:<26} {one.memory:<10} {one.summary}"
        )
    lines += [
        "",
        "Bubble in F, B, W of a whole rank and memory in its activations of one microbatch, with p",
        f"ranks, v chunks, m microbatches. Also: {FAMILY}:f=1,lag=1[,group=8][,fused], {AUTO},",
        f"{FILE}PATH. Draw one with: megalite schedule zb-h1 --stages 4 --microbatches 8",
    ]
    return "\n".join(lines)


def _comparison(schedules: list[_Simulated]) -> list[str]:
    """The lines of a table, a row per schedule."""
    rows = [
        ("schedule", "chunks", "step", "bubble", "span", "memory", "deferred", "p2p", "formula")
    ]
    for one in schedules:
        named = SCHEDULES.get(one.name)
        line = one.timeline
        rows.append(
            (
                one.name,
                str(one.schedule.v),
                f"{line.makespan:.4g}",
                f"{line.bubble_fraction:.1%}",
                f"{line.span_bubble:.4g}",
                f"{peak_activations(one.schedule):g}",
                f"{max(peak_deferred(one.schedule)) / one.schedule.v:g}",
                str(one.num_messages),
                named.bubble if named else "",
            )
        )

    # The first and the last column are text and stand left, numbers stand right.
    text_columns = (0, len(rows[0]) - 1)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if index in text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _print_picture(schedule: Schedule, timeline: Timeline, unit: float | None) -> None:
    rows = draw_text(schedule, timeline, unit)
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        for line in plain(rows):
            typer.echo(line)
        return
    for rank, row in enumerate(rows):
        console.print(_coloured(rank, row, len(str(len(rows) - 1))), soft_wrap=True)


def _coloured(rank: int, row: list[Cell], digits: int) -> str:
    words = [f"{rank:>{digits}} "]
    for cell in row:
        style = _STYLES[cell.action.kind] if cell.action else "dim"
        words.append(f"[{style}]{cell.text}[/]")
    return "".join(words)


def _write_files(one: _Simulated, output: _Output) -> None:
    """Write the files that `output` names, and print the path of each."""
    from megalite.schedules.view.draw_svg import draw_html, draw_svg

    if output.svg is not None or output.html is not None:
        picture = draw_svg(one.schedule, one.timeline, one.title, measured=one.measured)
        if output.svg is not None:
            _write(output.svg, picture)
        if output.html is not None:
            _write(output.html, draw_html(picture, one.title))

    if output.trace is not None:
        unit_us = 1000.0 if one.measured is None else 1e6  # a recorded step is in seconds
        text = chrome_trace(one.schedule, one.timeline, unit_us=unit_us, measured=one.measured)
        _write(output.trace, text)
    if output.csv is not None:
        _write(output.csv, write_csv(one.schedule))

    # Last, because matplotlib takes a second to import.
    if output.png is not None:
        from megalite.cli.schedule_png import draw_png

        draw_png(one.schedule, one.timeline, one.title, output.png)
        typer.echo(f"wrote {output.png}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}")
