"""A message board in the store that the ranks met at: every rank posts its state, all can read it.

It uses a connection of its own to that store, so that it works when collectives do not: a rank that
is stuck or alone can still read what became of the others. No call here waits for another rank,
except rank 0 in `leave`. A store that does not answer within `_ANSWER_S` counts as gone.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

T = TypeVar("T")

# How long the store may take to answer, in seconds.
_ANSWER_S = 5.0

# Keys of the store: a counter of the ranks that have called `leave`, and one that is there once a
# rank has posted an error.
_NUM_LEFT = "left"
_FAILED = "failed"


@dataclass(frozen=True)
class Notice:
    """The state of a rank as it last posted it."""

    beat: int  # grows with each post, so a rank whose beat stands still is dead or stopped
    num_ops: int  # operations between ranks that it has done, on CUDA its device
    where: str  # its current operation and phase, in words
    waits: bool = False  # it waits in that operation, so other ranks may have to come first
    reached: dict[str, int] = field(default_factory=dict)  # `OpProgress.reached`
    failed: str = ""  # the error that ended it, or ""
    left: bool = False  # it finished without an error and posts no more


class Board:
    """One rank's access to the board."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = PrefixStore("megalite/board", store)
        self._lock = threading.Lock()
        self._serves: Store = store

    @classmethod
    def of_world(cls, rank: int, world_size: int) -> Board | None:
        """The board of the default process group; None if there is no other process."""
        if world_size == 1 or not dist.is_initialized() or dist.get_backend() == "fake":
            return None
        first: Any = dist.distributed_c10d._get_default_store()
        store = first.clone()  # missing in torch's annotations
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        board = cls(store, rank, world_size)
        board._serves = first  # rank 0's serves all as long as it lives, also without the group
        return board

    def post(self, notice: Notice) -> bool:
        """Replace this rank's notice; True if the store took it."""
        text = json.dumps(asdict(notice))

        def write() -> bool:
            self._store.set(f"rank/{self.rank}", text)
            if notice.failed:
                self._store.set(_FAILED, "")
            return True

        return self._ask_store(write) or False

    def read(self) -> dict[int, Notice] | None:
        """The last notice of each rank that has posted one, by rank; None if the store is gone."""

        def fetch() -> dict[int, Notice]:
            found: dict[int, Notice] = {}
            for rank in range(self.world_size):
                key = f"rank/{rank}"
                if self._store.check([key]):
                    found[rank] = Notice(**json.loads(self._store.get(key)))
            return found

        return self._ask_store(fetch)

    def anyone_failed(self) -> bool:
        """True if a rank has posted an error; False also if the store is gone."""
        return self._ask_store(lambda: self._store.check([_FAILED])) or False

    def first_to_report(self, text: str) -> bool:
        """True for the first rank that asks for `text`, so that one rank alone prints it.

        True also if the store is gone: better printed by every rank than by none.
        """
        count = self._ask_store(lambda: self._store.add(_report_key(text), 1))
        return count is None or count == 1

    def leave(self, timeout_s: float) -> None:
        """End this rank's use of the board; its last call.

        Rank 0 may serve the store, which ends with its process, so it waits up to `timeout_s`
        until the other ranks have left as well. The other ranks return at once.
        """
        num_left = self._ask_store(lambda: self._store.add(_NUM_LEFT, 1))
        deadline = time.monotonic() + timeout_s
        while self.rank == 0 and num_left is not None and num_left < self.world_size:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
            num_left = self._ask_store(lambda: self._store.add(_NUM_LEFT, 0))

    def _ask_store(self, request: Callable[[], T]) -> T | None:
        """The result of `request`; None if it raises or takes longer than `_ANSWER_S`.

        It runs in a thread of its own, because an operation on the store of a stopped process
        never returns.
        """
        answers: list[T] = []  # at most one

        def run() -> None:
            with self._lock:
                try:
                    answers.append(request())
                except Exception:  # of any kind: whatever is wrong, there is no answer
                    return

        thread = threading.Thread(target=run, name="board", daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return answers[0] if answers else None


def _report_key(text: str) -> str:
    return f"reported/{hashlib.sha256(text.encode()).hexdigest()}"
