"""`megalite schedule`: draw, compare and write pipeline schedules, without torch.

Reading order: `schedule` (the options), then where schedules come from (`_build`, `_of_config`,
`_of_run`), then what is shown of them (`_Shown`, `_show`, `_comparison`, `_write`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalite.cli.completion import completion, runs_from, settings_from
from megalite.cli.formatting import print_json
from megalite.cli.options import (
    AsJson,
    Gpus,
    file,
    is_setting,
    near_runs,
    require_suffix,
    unknown_options,
)
from megalite.cli.options import path as as_path
from megalite.errors import ScheduleError, cannot_write
from megalite.schedules import Durations, Schedule, Timeline, build, recompute, simulate
from megalite.schedules.catalogue import FAMILY, SCHEDULES
from megalite.schedules.check import check_schedule
from megalite.schedules.csv_form import FILE, read_file, write_csv
from megalite.schedules.memory import peak_deferred, peak_live
from megalite.schedules.tune import AUTO, default_name, tune
from megalite.schedules.view.draw_svg import draw_html, draw_svg
from megalite.schedules.view.draw_text import Cell, draw_text, plain
from megalite.schedules.view.style import STYLES, Unit
from megalite.schedules.view.trace import Measured, chrome_trace, read_trace
from megalite.wording import number_of

if TYPE_CHECKING:
    from megalite.cli.schedule_config import Plan


def _to_file(what: str) -> Any:
    """An option that names the file to write."""
    return typer.Option(metavar="FILE", parser=file, help=f"Write {what} to FILE.")


def _time(what: str, least: float = 1e-9) -> Any:
    """An option that is a time."""
    return typer.Option(min=least, metavar="TIME", help=f"Time of {what}.")


def _count(what: str) -> Any:
    """An option that is a number of things."""
    return typer.Option(min=1, metavar="N", help=what)


def _words_from(ctx: typer.Context, start: str) -> list[str]:
    """For the shell: the schedules, and with --config the settings that begin with `start`."""
    names = [] if start.startswith(FILE) else [*SCHEDULES, AUTO, FILE, f"{FILE}PATH"]
    return names + (settings_from(ctx, start) if ctx.params.get("config") else [])


def schedule(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|SECTION.KEY=VALUE",
            help="Schedules (auto: the best; file:PATH: a CSV), and settings that replace "
            "those of --config.",
            autocompletion=completion(_words_from),
        ),
    ] = None,
    pp: Annotated[int, _count("Pipeline ranks.")] = 4,
    chunks: Annotated[
        int | None, _count("Model chunks per rank (default: 1 or 2, by schedule).")
    ] = None,
    microbatches: Annotated[int, _count("Microbatches per step.")] = 8,
    f: Annotated[float, _time("a rank's forward")] = 1.0,
    b: Annotated[float, _time("its input gradient")] = 1.0,
    w: Annotated[float, _time("its weight gradient")] = 1.0,
    comm: Annotated[float, _time("a hop between ranks", least=0.0)] = 0.0,
    max_activations: Annotated[
        float | None,
        typer.Option(metavar="N", help="For auto: most activations that a rank may hold."),
    ] = None,
    recomputed: Annotated[
        bool, typer.Option("--recompute", help="Run each forward again before its backward.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Print a table of the schedules (default: all).")
    ] = False,
    unit: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", help="Time of a column of the picture (default: the shortest action)."
        ),
    ] = None,
    svg: Annotated[Path | None, _to_file("the picture, as SVG,")] = None,
    html: Annotated[Path | None, _to_file("the picture, as a page that zooms,")] = None,
    png: Annotated[Path | None, _to_file("the picture, as PNG,")] = None,
    trace: Annotated[Path | None, _to_file("the time line, as a trace for Perfetto,")] = None,
    csv: Annotated[Path | None, _to_file("the schedule, as a CSV that file:PATH reads,")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            parser=as_path,
            help="A run's TOML file, or its name: its stages, their modelled times, its schedule.",
            autocompletion=completion(runs_from),
        ),
    ] = None,
    gpus: Gpus = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            parser=file,
            help="A run folder: its recorded step beside the simulated one.",
        ),
    ] = None,
    as_json: AsJson = False,
    stages: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Draw and compare pipeline schedules.

    Without arguments it lists the schedules. One is drawn with its bubble and memory; several are
    compared.
    """
    unknown_options(ctx)
    if stages is not None:  # the former name of --pp, but a stage is a chunk of the model
        raise ScheduleError("--stages is no option; write --pp N for N pipeline ranks")
    given = {"svg": svg, "html": html, "trace": trace, "csv": csv, "png": png}
    files = {kind: path for kind, path in given.items() if path is not None}
    for kind, path in files.items():
        if kind != "trace":  # Perfetto opens any name
            require_suffix(f"--{kind}", path, f".{kind}")
    settings = [word for word in words or [] if is_setting(word)]
    names = [word for word in words or [] if not is_setting(word)]

    # `lines` and `values` are what --config shows above its schedules, as text and as JSON.
    lines: list[str] = []
    values: dict[str, Any] = {}

    # A run or a config determines sizes and times, so options that would change them are refused.
    if from_run is not None:
        _require_none_of(ctx, "--from-run", *_SIZES, "words", "compare", "config", "gpus")
        shown = [_of_run(from_run)]
    elif config is not None:
        from megalite.cli.schedule_config import plan_of, stage_lines, stage_values

        _require_none_of(ctx, "--config", *_SIZES)
        plan = plan_of(config, settings, gpus)
        shown, left_out = _of_config(plan, names, compare)
        lines = [*stage_lines(plan), *(f"left out: {error}" for error in left_out)]
        values = {"stages": stage_values(plan), "left_out": left_out}
    elif settings or gpus is not None:
        given_word = settings[0] if settings else f"--gpus={gpus}"
        raise ScheduleError(f"{given_word} changes the run of --config; give both, or neither")
    elif not names and not compare:
        return print_json({"catalogue": _listed()}) if as_json else typer.echo(_catalogue())
    else:
        fit = [
            one.name for one in SCHEDULES.values() if chunks is None or one.chunks.allows(chunks)
        ]
        times = {"f": f, "b": b, "w": w, "hop": comm}
        build_one = partial(
            _build,
            p=pp,
            v=chunks,
            m=microbatches,
            times=times,
            limit=max_activations,
            again=recomputed,
        )
        shown = [build_one(name) for name in names or fit]
    if files and len(shown) != 1:
        raise ScheduleError("files are written for one schedule at a time; give one NAME")

    # Text comes before its files; JSON after them, because it has their paths.
    if not as_json:
        for line in lines:
            typer.echo(line)
        _show(shown, compare, unit, bool(files))
    for kind, path in files.items():
        _write(shown[0], kind, path)
        if not as_json:
            typer.echo(f"wrote {path}")
    if as_json:
        written = {kind: str(path) for kind, path in files.items()}
        print_json({**values, "schedules": [one.values for one in shown], "files": written})


@dataclass(frozen=True)
class _Shown:
    """A schedule with its simulated time line, and with its measured one where there is a record.

    unit: of the time axis of its pictures.
    """

    name: str
    schedule: Schedule
    timeline: Timeline
    unit: Unit
    record: Measured | None = None

    @property
    def title(self) -> str:
        """The line above the picture."""
        one = self.schedule
        sizes = (
            f"{number_of(one.p, 'rank')} x {number_of(one.v, 'chunk')}, "
            f"{number_of(one.m, 'microbatch')}"
        )
        most = number_of(self.values["peak_activations"], "microbatch", "g")
        figures = (
            "step {step_time:.4g}, bubble {bubble_fraction:.1%}, "
            f"activations of at most {most} a rank"
        )
        if self.record is not None:
            figures = _ratio(self.record, self.timeline)
        return f"{self.name}: {sizes}; {figures.format(**self.values)}"

    @property
    def measured(self) -> Timeline | None:
        """The measured time line, in the unit of the simulated one."""
        return None if self.record is None else self.record.timeline

    @cached_property
    def values(self) -> dict[str, Any]:
        """The figures of title and table by name, and those of each pipeline rank.

        Times are in the unit of the axis. Activations are in whole-rank activations of one
        microbatch. A message goes each way per microbatch between stages on different ranks.
        """
        s, line, factor = self.schedule, self.timeline, self.unit.factor
        live, deferred = peak_live(s), peak_deferred(s)
        found = {
            "name": self.name,
            "pp": s.p,
            "chunks": s.v,
            "microbatches": s.m,
            "time_unit": self.unit.text,
            "step_time": line.makespan * factor,
            "bubble_fraction": abs(line.bubble_fraction),  # no minus where it is rounded to 0
            "span_bubble": line.span_bubble * factor,
            "peak_activations": max(live) / s.v,
            "peak_deferred": max(deferred) / s.v,
            "messages": 2 * s.m * sum(a != b for a, b in pairwise(s.place)),
            "bubble_formula": SCHEDULES[self.name].bubble if self.name in SCHEDULES else "",
            "pipeline_ranks": [
                {"busy_time": t * factor, "peak_activations": a / s.v, "peak_deferred": d / s.v}
                for t, a, d in zip(line.busy, live, deferred, strict=True)
            ],
        }
        if self.record is not None:
            step_time = self.record.timeline.makespan * factor
            found["recorded"] = {"step": self.record.step, "step_time": step_time}
        return found


# The parameters that a config or a run determines.
_SIZES = (
    "pp",
    "chunks",
    "microbatches",
    "f",
    "b",
    "w",
    "comm",
    "max_activations",
    "recomputed",
)


def _require_none_of(ctx: typer.Context, source: str, *names: str) -> None:
    """Refuse parameters that the user gave beside `source`, which determines them itself."""
    for param in ctx.command.params:
        given = ctx.get_parameter_source(param.name or "")
        if param.name in names and given is not None and given.name == "COMMANDLINE":
            word = param.opts[0] if param.param_type_name == "option" else f"{param.metavar}"
            remedy = ", or change the config by SECTION.KEY=VALUE" if source == "--config" else ""
            raise ScheduleError(
                f"{word} has no effect with {source}, which determines it; take it out{remedy}"
            )


def _build(
    name: str,
    *,
    p: int,
    v: int | None,
    m: int,
    times: Mapping[str, float],
    limit: float | None,
    again: bool,
) -> _Shown:
    """The schedule of a name at the sizes of the command line, checked and simulated.

    v None: chunks by name. times: of a whole rank, as `Durations.even` takes them. limit: most
    activations, for auto. again: with recomputation.
    """
    if v is None:
        v = SCHEDULES[name].chunks.minimum if name in SCHEDULES else 1
    durations = Durations.even(p, v, **times)

    # These two stand for a choice among the others; the title shows the one chosen.
    if name == AUTO:
        name = tune(p, v, m, durations, limit)[0].name
    if name == "default":
        name = default_name(p, v, m)

    from_file = name.startswith(FILE)
    built = read_file(name[len(FILE) :], p, v, m) if from_file else build(name, p, v, m)
    if again:
        built = recompute(built)
    check_schedule(built)
    unit = Unit(f"time ({times['f']:g} = a rank's forward of one microbatch)")
    return _Shown(name, built, simulate(built, durations), unit)


def _of_config(plan: Plan, names: list[str], compare: bool) -> tuple[list[_Shown], list[str]]:
    """A run's schedule, or others in its place; and why some of all were left out."""
    every = compare and not names
    fit = [one.name for one in SCHEDULES.values() if one.chunks.allows(plan.config.parallel.vpp)]
    unit = Unit("time (1 = the mean rank's work on one microbatch)")

    # Only a comparison of all schedules may leave one out; a name that the user gave must fit.
    shown, left_out = [], []
    for name in fit if every else names or [plan.name]:
        try:
            own, durations = plan.schedule(name)
            shown.append(_Shown(name, own, simulate(own, durations), unit))
        except ScheduleError as error:
            if not every:
                raise
            left_out.append(str(error))
    return shown, left_out


def _of_run(run: Path) -> _Shown:
    """The recorded step of a run beside a simulation of it with the same durations."""
    with near_runs(run):
        record = read_trace(run)
    simulated = simulate(record.schedule, record.durations())
    return _Shown(record.name, record.schedule, simulated, Unit("time (ms)", 1e3), record)


def _ratio(record: Measured, simulated: Timeline) -> str:
    """The recorded step's time beside that of its simulation, in a clause."""
    took, ideal = record.timeline.makespan, simulated.makespan
    return (
        f"step {record.step}: measured {took * 1e3:.1f} ms, simulated {ideal * 1e3:.1f} ms "
        f"(median durations), ratio {ideal / took:.3f}"
    )


def _show(shown: Sequence[_Shown], compare: bool, unit: float | None, drawn: bool) -> None:
    """Print a table of several schedules, or the figures and the picture of one.

    drawn: the picture is in a file, so that none is printed.
    """
    if compare or len(shown) != 1:
        for line in _comparison(shown):
            typer.echo(line)
        return
    (one,) = shown
    if one.record is not None:
        typer.echo(f"{one.name}, {_ratio(one.record, one.timeline)}")
        column = unit if unit is not None else one.record.timeline.makespan / 100
        both = {} if drawn else {"simulated": one.timeline, "measured": one.record.timeline}
        for title, timeline in both.items():
            typer.echo(f"{title} (a column is {column * 1e3:.3g} ms)")
            _print_picture(one.schedule, timeline, column)
    elif not drawn:
        typer.echo(one.title)
        _print_picture(one.schedule, one.timeline, unit)


def _listed() -> list[dict[str, str]]:
    """The rows of the catalogue."""
    return [
        {
            "name": one.name,
            "chunks": one.chunks.text,
            "bubble": one.bubble,
            "memory": one.memory,
            "summary": one.summary,
        }
        for one in SCHEDULES.values()
    ]


def _catalogue() -> str:
    lines = ["schedule           chunks  bubble                     memory     what it is"]
    row = "{name:<18} {chunks:>6}  {bubble:<26} {memory:<10} {summary}"
    lines += [row.format(**one) for one in _listed()]
    lines += [
        "",
        "Bubble in F, B, W of a whole rank and memory in its activations of one microbatch, with p",
        f"ranks, v chunks, m microbatches. Also: {FAMILY}:f=1,lag=1[,group=8][,fused], {AUTO},",
        f"{FILE}PATH. Draw one with: megalite schedule zb-h1 --pp 4 --microbatches 8",
    ]
    return "\n".join(lines)


# The columns of a comparison: a name and how a value is written. Numbers stand right.
_COLUMNS = {
    "schedule": "{name}",
    "chunks": "{chunks}",
    "step": "{step_time:.4g}",
    "bubble": "{bubble_fraction:.1%}",
    "span": "{span_bubble:.4g}",
    "memory": "{peak_activations:g}",
    "deferred": "{peak_deferred:g}",
    "p2p": "{messages}",
    "formula": "{bubble_formula}",
}


def _comparison(shown: Sequence[_Shown]) -> list[str]:
    """The lines of a table, a row per schedule."""
    columns = []
    for head, form in _COLUMNS.items():
        cells = [head, *(form.format(**one.values) for one in shown)]
        pad = str.ljust if head in ("schedule", "formula") else str.rjust
        columns.append([pad(cell, max(map(len, cells))) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _print_picture(schedule: Schedule, timeline: Timeline, unit: float | None) -> None:
    try:
        rows = draw_text(schedule, timeline, unit)
    except ScheduleError as error:
        if unit is not None:
            raise
        return typer.echo(f"no picture here: {error} (--unit, --svg, --html)")
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
        style = STYLES[cell.action.kind].terminal if cell.action else "dim"
        words.append(f"[{style}]{cell.text}[/]")
    return "".join(words)


def _write(one: _Shown, kind: str, path: Path) -> None:
    """Write a schedule's file of a kind."""
    if kind == "png":
        return _write_png(one, path)
    try:
        path.write_text(_text_of(one, kind), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(cannot_write(path, error)) from None


def _write_png(one: _Shown, path: Path) -> None:
    # Here, because matplotlib takes a second to import, and may not be there.
    from megalite.checks.packages import missing_package
    from megalite.cli.schedule_png import schedule_figure
    from megalite.record.figure import save

    if lacking := missing_package("matplotlib"):
        raise ScheduleError(f"--png {lacking}; or use --svg, which needs no package")
    figure = schedule_figure(
        one.schedule, one.timeline, one.title, unit=one.unit, measured=one.measured
    )
    save(figure, path)


def _text_of(one: _Shown, kind: str) -> str:
    """The content of a schedule's file of a kind."""
    if kind == "csv":
        return write_csv(one.schedule)
    if kind == "trace":
        unit_us = 1000.0 if one.measured is None else 1e6  # a recorded step is in seconds
        return chrome_trace(one.schedule, one.timeline, unit_us=unit_us, measured=one.measured)
    picture = draw_svg(one.schedule, one.timeline, one.title, unit=one.unit, measured=one.measured)
    return draw_html(picture, one.title) if kind == "html" else picture
