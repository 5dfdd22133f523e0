"""Deletion of a run's checkpoints as its settings have it.

run/retention.py decides which stay. Never deleted are those that a version without checkpoint.keep
saved, which have no such setting in their manifest, what is a link or lies outside the run folder,
and what checkpoint.load_weights names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.find import open_checkpoint
from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.names import checkpoints_of, list_steps, step_name
from megalite.checkpoint.store import check_sizes, delete
from megalite.config import RunConfig
from megalite.distributed.agree import Ranks
from megalite.errors import CheckpointError
from megalite.record.run_log import RunLog
from megalite.run.retention import kept_steps


class Retention:
    """A run's checkpoints that may be deleted. Does nothing where the log is not open."""

    def __init__(self, config: RunConfig, log: RunLog) -> None:
        self._config, self._log, self._disk = config, log, Disk()
        self._root = checkpoints_of(config.folder)
        self._own: dict[int, Path] = {}
        self._damaged: set[int] = set()

    def survey(self) -> Iterator[str]:
        """Look at what earlier attempts saved; a line about what is never deleted."""
        num_others = 0
        for step, path in list_steps(self._root):
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                num_others += 1  # whose it is cannot be read
                continue
            if not (_has_setting(manifest) and self._is_ours(path)):
                num_others += 1
                continue
            self._own[step] = path
            try:
                check_sizes(path, manifest, list(manifest.files))
            except CheckpointError:
                self._damaged.add(step)
        if num_others:
            yield (
                f"{num_others} more in {self._root} are never deleted (saved by a version without "
                "checkpoint.keep, outside the run folder, or not readable)"
            )

    def clean_up(self, step: int, losses: Mapping[int, float], ranks: Ranks) -> None:
        """Delete what need not stay now that `step` is saved, and what a rollback left above it.

        losses: see `kept_steps`. All ranks call it: before an older checkpoint goes, they read the
        newer one back, every byte. What fails is a warning.
        """
        doomed = self._doomed(step, losses) if self._log.is_open else []
        if not ranks.any(bool(doomed)):
            return
        try:
            open_checkpoint(self._root / step_name(step), ranks)
            delete(self._root, doomed, self._disk)
        except (CheckpointError, OSError) as error:
            self._log.print(f"warning: step {step}: older checkpoints were not deleted: {error}")
        else:
            self._log.print(f"step {step:5d}: deleted {', '.join(p.name for p in doomed)}")

    def _doomed(self, step: int, losses: Mapping[int, float]) -> list[Path]:
        """The checkpoints that need not stay, oldest first."""
        saved = self._root / step_name(step)
        self._own = {s: path for s, path in self._own.items() if path.is_dir()}
        if self._is_ours(saved):
            self._own[step] = saved
            self._damaged.discard(step)
        whole = [s for s in self._own if s <= step and s not in self._damaged]
        kept = kept_steps(self._config.checkpoint, whole, losses) | {step}
        return [path for s, path in sorted(self._own.items()) if s not in kept]

    def _is_ours(self, path: Path) -> bool:
        """True if a checkpoint lies in the run folder, and load_weights does not name it."""
        named = self._config.checkpoint.load_weights
        is_named = named is not None and Path(named).resolve() == path.resolve()
        inside = path.resolve().is_relative_to(self._config.folder.resolve())
        return inside and not path.is_symlink() and not is_named


def _has_setting(manifest: Manifest) -> bool:
    """True if a version with checkpoint.keep saved it."""
    config = manifest.config
    settings = config.get("checkpoint") if isinstance(config, dict) else None
    return isinstance(settings, dict) and "keep" in settings
