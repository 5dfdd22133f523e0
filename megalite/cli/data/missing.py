"""Making the data of a run that says how (`data.prepare`) before it starts."""

from __future__ import annotations

import shlex
import subprocess
import sys

import typer

from megalite.errors import EXIT_SAVED
from megalite.process.signals import SignalFlag, leave_now


def run_prepare(words: list[str]) -> None:
    """Run `megalite data prepare` with these words and wait for it; exits with its code if not 0.

    In a process of its own, as ranks are forked from this one, which must not have had threads.
    Signals are passed on to it: it keeps what is done, and the same start goes on from there.
    """
    command = ["megalite", "data", "prepare", *words]
    typer.echo(f"the data is not there yet, so this makes it: {shlex.join(command)}")
    sys.stdout.flush()

    # In a group of its own it gets Ctrl-C once, from here, and not from the terminal as well.
    with SignalFlag("") as flag:
        process = subprocess.Popen([sys.executable, "-P", "-m", *command], process_group=0)

        def end(code: int) -> None:
            process.kill()
            leave_now(code)

        flag.pass_on, flag.end = process.send_signal, end
        for number in flag.received:
            process.send_signal(number)
        code = process.wait()
    if flag.raised and code == 0:
        code = EXIT_SAVED  # made all the same, but the run was asked not to go on
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)
