"""`megalite train` on a terminal: what Ctrl-C typed there does, to it and to the run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megalite.config.text import to_toml
from tests import ROOT
from tests.train.kit.runs import GLOBAL_BATCH, lines, make_config, write_tokens

pytestmark = pytest.mark.long

CTRL_C = b"\x03"
FIRST = "SIGINT: saves at the end of the step and leaves; again: ends at once"
AGAIN = "SIGINT again: ends at once, without saving"


class Session:
    """A command in the foreground of a terminal of its own."""

    def __init__(self, *command: str | Path) -> None:
        self._keys, theirs = pty.openpty()
        self._shown = b""
        # A suite that was started in the background hands on an ignored Ctrl-C.
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def press(self, keys: bytes) -> None:
        os.write(self._keys, keys)

    def hang_up(self) -> None:
        """Close the terminal, as a lost connection does."""
        os.close(self._keys)
        self._keys = -1

    @property
    def screen(self) -> str:
        """What was written to the terminal until now."""
        while self._keys >= 0 and select.select([self._keys], [], [], 0)[0]:
            try:
                part = os.read(self._keys, 65536)
            except OSError:  # nobody has it open any more
                break
            if not part:
                break
            self._shown += part
        return self._shown.decode(errors="replace")

    def wait_until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not there():
            assert time.monotonic() < deadline, self.screen
            time.sleep(0.01)

    def code(self) -> int:
        """The exit code, once it has ended; a full terminal would hold it up."""
        self.wait_until(lambda: (self.screen, self.process.poll())[1] is not None)
        return int(self.process.returncode)

    def ranks(self) -> list[int]:
        pid = self.process.pid
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._keys >= 0:
            os.close(self._keys)


def _take_terminal() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Callable[[str], Session]]:
    """`session(layout)`: a run that trains until it is stopped, in `tmp_path/run`."""
    write_tokens(tmp_path / "data", 3 * GLOBAL_BATCH)
    with contextlib.ExitStack() as stack:

        def start(layout: str) -> Session:
            config = make_config(
                tmp_path, "run", layout, train__steps=10**6, optimizer__lr_schedule="constant"
            )
            path = tmp_path / "run.toml"
            path.write_text(to_toml(config))
            local = [] if layout == "serial" else ["--local"]
            found = Session(sys.executable, "-m", "megalite", "train", path, *local)
            stack.callback(found.close)
            found.wait_until(lambda: (found.screen, len(lines(tmp_path / "run", "step")))[1] >= 2)
            return found

        yield start


def cursor_is_shown(screen: str) -> bool:
    """True if the cursor was hidden, and shown again."""
    return 0 <= screen.rfind("\x1b[?25l") < screen.rfind("\x1b[?25h")


@pytest.mark.parametrize("layout", ["serial", "tp2"])
def test_ctrl_c_saves_once_and_gives_the_terminal_back(
    session: Callable[[str], Session], tmp_path: Path, layout: str
) -> None:
    found = session(layout)
    found.press(CTRL_C)
    assert found.code() == 75, found.screen
    (end,) = lines(tmp_path / "run", "end")
    assert (end["reason"], end["exit_code"]) == ("SIGINT", 75)
    assert len(lines(tmp_path / "run", "checkpoint")) == 1
    assert found.screen.count(FIRST) == 1
    assert AGAIN not in found.screen
    assert "; the same command goes on from there" in found.screen
    assert "Traceback" not in found.screen
    assert cursor_is_shown(found.screen)


def test_a_second_ctrl_c_ends_at_once_and_gives_the_terminal_back(
    session: Callable[[str], Session], tmp_path: Path
) -> None:
    """One rank is stopped, so that the first cannot take effect."""
    found = session("tp2")
    os.kill(found.ranks()[1], signal.SIGSTOP)
    found.press(CTRL_C)
    found.wait_until(lambda: FIRST in found.screen)
    time.sleep(0.3)  # sooner it would be the same request
    found.press(CTRL_C)
    assert found.code() == 130, found.screen
    assert AGAIN in found.screen
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert cursor_is_shown(found.screen)


@pytest.mark.parametrize("layout", ["serial", "tp2"])
def test_a_closed_terminal_saves_the_run(
    session: Callable[[str], Session], tmp_path: Path, layout: str
) -> None:
    found = session(layout)
    found.hang_up()
    assert found.code() == 75
    end = lines(tmp_path / "run", "end")[-1]
    assert (end["reason"], end["exit_code"]) == ("SIGHUP", 75)
    assert (tmp_path / "run" / "checkpoints" / f"step-{end['step']:08d}").is_dir()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.endswith(
        f"SIGHUP at step {end['step']} of 1000000; the same command goes on from there\n"
    )
