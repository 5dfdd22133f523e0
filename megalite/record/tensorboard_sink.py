"""The view of a run in TensorBoard: events in the run folder's `tensorboard`.

Each attempt writes a file of its own. After a rollback TensorBoard shows the later attempt; the
events of the earlier one stay in their file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.record.views import scalars

_FLUSH_S = 30  # seconds between two writes of the file


class TensorBoardSink:
    """Writes scalars by step, and the config as text."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] in ("run", "restart"):
            self._open(record)
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])
        if record["kind"] == "checkpoint":
            self._writer.flush()

    def close(self, exit_code: int) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, record: dict[str, Any]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # A later attempt hides the events of steps that it does again.
        first = None if record["kind"] == "run" else record["step"] + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=first, flush_secs=_FLUSH_S)
        self._writer.add_text("config", _as_table(record["config"]), record["step"])


def _as_table(config: dict[str, Any]) -> str:
    """Settings as a Markdown table, section by section."""
    rows = [
        f"| {section}.{key} | `{value}` |"
        for section, values in config.items()
        if isinstance(values, dict)
        for key, value in values.items()
    ]
    return "\n".join(["| setting | value |", "| --- | --- |", *rows])
