"""A thread that speaks up when this rank has been stuck for too long.

gloo turns a hang into an exception, which the ledger annotates. NCCL's own watchdog ends the
process instead, without a word on where the program was; this thread says it first. It ends
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from megalite.distributed.ledger import Ledger


class Watch:
    """Inside `with Watch(...)`: `report` gets one line each time no operation between ranks has
    started for `after_s` seconds. Set `after_s` below the collectives' timeout.
    """

    def __init__(self, ledger: Ledger, after_s: float, report: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._after_s = after_s
        self._report = report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        seen = self._ledger.num_ops
        reported = False
        while not self._stop.wait(self._after_s):
            stuck = self._ledger.num_ops == seen
            if stuck and not reported:
                self._report(f"nothing new for {self._after_s:g} s: {self._ledger.describe()}")
            reported = stuck
            seen = self._ledger.num_ops
