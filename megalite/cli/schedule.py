"""`megalite schedule`: draw, compare and write pipeline schedules, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.errors import ScheduleError
from megalite.schedules import Durations, Schedule, Timeline, build, recompute, simulate
from megalite.schedules.action import BACKWARD
from megalite.schedules.catalogue import FAMILY, KINDS
from megalite.schedules.check import check_schedule
from megalite.schedules.csv_form import FILE, read_file, write_csv
from megalite.schedules.memory import peak_deferred
from megalite.schedules.tune import AUTO, default_name, memory_of, tune
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
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as a page that zooms.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write it as a bitmap.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the schedule as a CSV.")] = None,
    config: Annotated[
        str | None,
        typer.Option(help="A run's config: its stages, their modelled times, its schedule."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of --config; repeatable."),
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(help="A run folder: its recorded step beside the simulated one.")
    ] = None,
) -> None:
    """Draw a pipeline schedule, or compare several: bubble, memory, messages."""
    counts = (stages, chunks, microbatches)
    files = (svg, html, png, trace, csv)
    if from_run is not None:
        if names or compare or config is not None:
            raise ScheduleError(
                "--from-run shows the schedule of the run; give no NAME and no --config with it"
            )
        return _show_run(from_run, unit, files)
    if config is not None:
        _require_none_of(ctx, "stages", "chunks", "microbatches", "f", "b", "w", "comm")
        _require_none_of(ctx, "memory", "recomputed")
        return _show_config(config, overrides or [], names or [], compare, unit, files)
    if overrides:
        raise ScheduleError("--set changes a setting of --config; give both, or neither")
    if not names and not compare:
        typer.echo(_catalogue())
        return
    compared = names or [k.name for k in KINDS.values() if chunks is None or k.allows(chunks)]
    made = [_make(name, *counts, (f, b, w, comm), memory, recomputed) for name in compared]
    _show(made, compare, unit, files)


def _require_none_of(ctx: typer.Context, *options: str) -> None:
    for option in options:
        source = ctx.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            flag = {"recomputed": "recompute"}.get(option, option)
            raise ScheduleError(
                f"--{flag} has no effect with --config, which says it itself; take it out, or "
                "change the config with --set"
            )


Files = tuple[Path | None, Path | None, Path | None, Path | None, Path | None]


def _show(made: list[_Made], compare: bool, unit: float | None, files: Files) -> None:
    """A table of several schedules, or the picture of one, or its files."""
    if compare or len(made) > 1:
        for line in _comparison(made):
            typer.echo(line)
    if len(made) != 1:
        return _require_no_files(*files)
    one = made[0]
    if not compare and not any(files):
        typer.echo(one.title)
        _print_picture(one.schedule, one.timeline, unit)
    _write_files(one, *files)


def _show_config(
    path: str,
    overrides: list[str],
    names: list[str],
    compare: bool,
    unit: float | None,
    files: Files,
) -> None:
    """The stages of a run and what each has to do, then its schedule, or others in its place."""
    from megalite.cli.schedule_config import plan_of, stage_lines

    plan = plan_of(path, overrides)
    for line in stage_lines(plan):
        typer.echo(line)
    wanted = names or [plan.name]
    if compare and not names:
        wanted = [kind.name for kind in KINDS.values() if kind.allows(plan.v)]
    made, left_out = [], []
    for name in wanted:
        try:
            made.append(_Made(name, *plan.schedule(name)))
        except ScheduleError as error:
            if names or not compare:
                raise
            left_out.append(f"left out: {error}")
    for line in left_out:
        typer.echo(line)
    _show(made, compare, unit, files)


def _show_run(run: Path, unit: float | None, files: Files) -> None:
    """The recorded step of a run, and what its schedule would take with the same durations."""
    measured = read_trace(run)
    one = _Made(measured.name, measured.schedule, measured.durations())
    one.measured = measured.timeline
    took, ideal = measured.timeline.makespan, one.timeline.makespan
    typer.echo(
        f"{measured.name}, step {measured.step}: measured {took * 1e3:.1f} ms, simulated with the "
        f"median durations of its actions {ideal * 1e3:.1f} ms, ratio {ideal / took:.3f}"
    )
    if not any(files):
        column = unit if unit is not None else took / 100
        for title, line in (("simulated", one.timeline), ("measured", measured.timeline)):
            typer.echo(f"{title} (a column is {column * 1e3:.3g} ms)")
            _print_picture(one.schedule, line, column)
    _write_files(one, *files)


class _Made:
    """A schedule with its time line and a line that describes it."""

    def __init__(self, name: str, schedule: Schedule, durations: Durations) -> None:
        self.name, self.schedule = name, schedule
        self.timeline: Timeline = simulate(schedule, durations)
        self.measured: Timeline | None = None
        pairs = zip(schedule.place, schedule.place[1:], strict=False)
        self.messages = 2 * schedule.m * sum(a != b for a, b in pairs)

    @property
    def title(self) -> str:
        s, line = self.schedule, self.timeline
        return (
            f"{self.name}: {s.p} ranks x {s.v} chunks, {s.m} microbatches; step "
            f"{line.makespan:.4g}, bubble {line.bubble_fraction:.1%}, at most "
            f"{memory_of(s):g} activations a rank"
        )


def _make(
    name: str,
    p: int,
    v: int | None,
    m: int,
    times: tuple[float, float, float, float],
    memory: float | None,
    recomputed: bool,
) -> _Made:
    kind = KINDS.get(name)
    chunks = v if v is not None else 2 if kind is not None and not kind.allows(1) else 1
    f, b, w, comm = times
    durations = Durations.even(p, chunks, f=f, b=b, w=w, hop=comm)
    if name == AUTO:
        name = tune(p, chunks, m, durations, memory)[0].name
    if name == "default":
        name = default_name(p, chunks, m)
    is_file = name.startswith(FILE)
    made = read_file(name[len(FILE) :], p, chunks, m) if is_file else build(name, p, chunks, m)
    made = recompute(made) if recomputed else made
    check_schedule(made)
    return _Made(name, made, durations)


def _catalogue() -> str:
    lines = ["schedule           chunks  bubble                     memory     what it is"]
    for kind in KINDS.values():
        lines.append(
            f"{kind.name:<18} {kind.v:>6}  {kind.bubble:<26} {kind.memory:<10} {kind.summary}"
        )
    lines += [
        "",
        "Bubble in F, B, W of a whole rank and memory in its activations of one microbatch, with p",
        f"ranks, v chunks, m microbatches. Also: {FAMILY}:f=1,lag=1[,group=8][,fused], {AUTO},",
        f"{FILE}PATH. Draw one with: megalite schedule zb-h1 --stages 4 --microbatches 8",
    ]
    return "\n".join(lines)


def _comparison(made: list[_Made]) -> list[str]:
    rows = [
        ("schedule", "chunks", "step", "bubble", "span", "memory", "deferred", "p2p", "formula")
    ]
    for one in made:
        kind = KINDS.get(one.name)
        line = one.timeline
        rows.append(
            (
                one.name,
                str(one.schedule.v),
                f"{line.makespan:.4g}",
                f"{line.bubble_fraction:.1%}",
                f"{line.span_bubble:.4g}",
                f"{memory_of(one.schedule):g}",
                f"{max(peak_deferred(one.schedule)) / one.schedule.v:g}",
                str(one.messages),
                kind.bubble if kind else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if index in (0, 8) else cell.rjust(width)
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


def _require_no_files(*paths: Path | None) -> None:
    if any(paths):
        raise ScheduleError("files are written for one schedule at a time; give one NAME")


def _write_files(
    one: _Made,
    svg: Path | None,
    html: Path | None,
    png: Path | None,
    trace: Path | None,
    csv: Path | None,
) -> None:
    from megalite.schedules.view.draw_svg import draw_html, draw_svg

    drawn, real = (one.schedule, one.timeline), one.measured
    picture = draw_svg(*drawn, one.title, measured=real) if svg or html else ""
    unit_us = 1000.0 if real is None else 1e6  # a recorded step is in seconds
    for path, text in (
        (svg, picture),
        (html, draw_html(picture, one.title) if html else ""),
        (trace, chrome_trace(*drawn, unit_us=unit_us, measured=real) if trace else ""),
        (csv, write_csv(one.schedule) if csv else ""),
    ):
        if path is not None:
            _write(path, text)
    if png is not None:
        from megalite.cli.schedule_png import draw_png

        draw_png(one.schedule, one.timeline, one.title, png)
        typer.echo(f"wrote {png}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}")
