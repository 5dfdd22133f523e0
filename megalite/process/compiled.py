"""Compiled Triton kernels of a host: on its own disk, and each compiled by one of its ranks.

All ranks meet the same kernels in their first step. Without this each of them compiles each, and on
a cluster all of them write the results into one folder of a shared home.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from megalite.process.launcher import Launch
from megalite.wording import number_of

_SLOW_S = 1.0  # a kernel that was on disk takes less
_EVERY_S = 10.0  # between two lines of progress


def use_cache_of_host(launch: Launch) -> None:
    """Point Triton's cache to this host's own disk if ranks run on several hosts.

    On one host its usual place serves the next run too. A place that the user chose
    (TRITON_CACHE_DIR) stays. Call it before Triton is imported.
    """
    if not launch.spans_hosts or os.environ.get("TRITON_CACHE_DIR"):
        return
    folder = Path(tempfile.gettempdir()) / f"megalite-triton-{os.getuid()}"
    # In a folder that all may write to: another user may have made it, or a link or file in its
    # place. Triton's usual place serves then, too.
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        os.environ["TRITON_CACHE_DIR"] = str(folder)


class CompileQueue:
    """Lets one process of a host compile a kernel while the others wait for it, then find it.

    `report` gets a line of progress while the first steps compile. Only processes that share
    Triton's cache wait for each other, at a lock in it; without locks each compiles for itself.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        import triton.knobs

        self._knobs = triton.knobs
        self._report = report
        self._folder = Path(self._knobs.cache.dir) / "locks"
        self._held: dict[str, tuple[TextIO | None, float]] = {}  # by kernel
        self._compiled, self._seconds, self._reported_s = 0, 0.0, -_EVERY_S

    def install(self) -> None:
        """Take part in every compilation of this process from now on."""
        self._knobs.runtime.jit_cache_hook = self._before
        self._knobs.runtime.jit_post_compile_hook = self._after

    def _before(self, *, key: Any, fn: Any, **_: Any) -> None:
        name = hashlib.sha256(f"{fn.module}.{fn.name} {key}".encode()).hexdigest()
        self._release(name)  # of a compilation that failed
        self._held[name] = (self._lock(name), time.monotonic())

    def _after(self, *, key: Any, fn: Any, **_: Any) -> None:
        name = hashlib.sha256(f"{fn.module}.{fn.name} {key}".encode()).hexdigest()
        seconds = self._release(name)
        if seconds < _SLOW_S:
            return
        self._compiled += 1
        self._seconds += seconds
        now = time.monotonic()
        if now - self._reported_s >= _EVERY_S:
            self._reported_s = now
            kernels = number_of(self._compiled, "kernel")
            self._report(
                f"compiling Triton's kernels: {kernels} in {self._seconds:.0f} s so far, "
                f"the last one {fn.name.strip('_')}"
            )

    def _lock(self, name: str) -> TextIO | None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = (self._folder / name).open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return None
        return file

    def _release(self, name: str) -> float:
        """Give a kernel's lock back; the seconds that its compilation took."""
        file, began = self._held.pop(name, (None, time.monotonic()))
        if file is not None:
            file.close()
        return time.monotonic() - began
