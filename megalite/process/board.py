"""A notice board that all ranks can read: who is where, who has failed, who has said what.

It lies in the store that the ranks met at, through a connection of its own, so that it works when
collectives do not: a rank that is stuck or alone can still learn what became of the others. Nothing
here waits for another rank; a store that does not answer in time counts as gone.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

T = TypeVar("T")

# How long the store may take to answer, in seconds.
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Notice:
    """What a rank last posted. `beat` grows as long as it lives; `failed` is its error, or "";
    `left`: it was done, and posts no more.
    """

    beat: int
    num_ops: int
    where: str
    failed: str = ""
    left: bool = False


class Board:
    """This rank's view of the board."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = PrefixStore("megalite/board", store)
        self._lock = threading.Lock()

    @classmethod
    def of_world(cls, rank: int, world_size: int) -> Board | None:
        """The board of the default process group; None where there is nobody else."""
        if world_size == 1 or not dist.is_initialized() or dist.get_backend() == "fake":
            return None
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()  # torch's annotations do not know it
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        return cls(store, rank, world_size)

    def post(self, notice: Notice) -> bool:
        """Put up this rank's notice in place of its last; whether the store took it."""
        text = json.dumps(asdict(notice))

        def write() -> bool:
            self._store.set(f"rank/{self.rank}", text)
            return True

        return self._soon(write) or False

    def read(self) -> dict[int, Notice] | None:
        """Everyone's last notice, without ranks that posted none; None if the store is gone."""

        def fetch() -> dict[int, Notice]:
            found: dict[int, Notice] = {}
            for rank in range(self.world_size):
                key = f"rank/{rank}"
                if self._store.check([key]):
                    found[rank] = Notice(**json.loads(self._store.get(key)))
            return found

        return self._soon(fetch)

    def first_to_say(self, text: str) -> bool:
        """Whether no other rank has asked this for the same text; True if the store is gone."""
        count = self._soon(lambda: self._store.add(_said(text), 1))
        return count is None or count == 1

    def part(self, seconds: float) -> None:
        """The last use of the board by this rank. Rank 0, which may serve the store, gives the
        others so many seconds to part as well, as the store ends with it.
        """
        gone = self._soon(lambda: self._store.add("parted", 1))
        deadline = time.monotonic() + seconds
        while self.rank == 0 and gone is not None and gone < self.world_size:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
            gone = self._soon(lambda: self._store.add("parted", 0))

    def _soon(self, ask: Callable[[], T]) -> T | None:
        """What `ask` returns, or None if the store fails or takes too long.

        In a thread of its own: an operation on the store of a stopped process never returns.
        """
        answers: list[T] = []

        def run() -> None:
            with self._lock:
                try:
                    answers.append(ask())
                except Exception:  # of any kind: whatever is wrong, there is no answer
                    return

        thread = threading.Thread(target=run, name="board", daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return answers[0] if answers else None


def _said(text: str) -> str:
    return f"said/{hashlib.sha256(text.encode()).hexdigest()}"
