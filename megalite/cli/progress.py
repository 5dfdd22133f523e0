"""A progress bar with rate and time left, where stderr is a terminal; nothing elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.corpus.prepare_tokenizer import Progress


class ProgressBar:
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
        from rich.progress import Progress as RichProgress

        # Disabled where stderr is no terminal: log files get no control characters.
        console = Console(stderr=True)
        self._rich = RichProgress(
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

    def __enter__(self) -> ProgressBar:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            for task in self._rich.task_ids:
                self._rich.remove_task(task)
            self._phase = progress.phase
            self._task = self._rich.add_task(progress.phase, tokens="")
        self._rich.update(
            self._task,
            completed=progress.done_bytes,
            total=progress.total_bytes,
            tokens=f"{progress.num_tokens / 1e6:,.1f}M tokens" if progress.num_tokens else "",
        )
