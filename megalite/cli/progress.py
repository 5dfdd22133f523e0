"""A progress bar with rate and time left, where stderr is a terminal; nothing elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.corpus.prepare_tokenizer import Progress


class Bar:
    """Shows the `Progress` it is called with. A context manager."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.fields[tokens]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._phase = ""

    def __enter__(self) -> Bar:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            for known in self._bars.task_ids:
                self._bars.remove_task(known)
            self._phase = progress.phase
            self._task = self._bars.add_task(progress.phase, tokens="")
        self._bars.update(
            self._task,
            completed=progress.done_bytes,
            total=progress.total_bytes,
            tokens=f"{progress.num_tokens / 1e6:,.1f}M tokens" if progress.num_tokens else "",
        )
