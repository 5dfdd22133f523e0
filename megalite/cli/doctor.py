"""`megalite doctor`: what this machine has and what it lacks. Thin: findings as lines or JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.formatting import print_json
from megalite.cli.options import AsJson, path

_MARKS = {"ok": "ok", "warning": "warn", "missing": "MISS"}


def doctor(
    out: Annotated[
        str,
        typer.Option(metavar="FOLDER", parser=path, help="Where run folders would go."),
    ] = "runs",
    as_json: AsJson = False,
) -> None:
    """Check what this machine has and lacks for training.

    Exit code 1 if it cannot train.
    """
    from megalite.record.doctor import examine, exit_code

    findings = examine(Path(out))
    code = exit_code(findings)
    if as_json:
        print_json({"ok": code == 0, "findings": [asdict(finding) for finding in findings]})
        raise typer.Exit(code)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        typer.echo(f"{_MARKS[finding.status]:<5}{finding.name:<{width}}  {finding.found}")
        if finding.status != "ok" and finding.remedy:
            typer.echo(f"{'':<5}{'':<{width}}  -> {finding.remedy}")
    typer.echo("ready to train" if code == 0 else "not ready: see the lines marked MISS")
    raise typer.Exit(code)
