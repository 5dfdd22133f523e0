"""The weights that a run began from, on record in its checkpoints. Without torch.

`checkpoint.load_weights` is read at step 0 alone. A run that has saved resumes; named again, the
setting must lead to what it was then, as it would otherwise have no effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.manifest import manifest_hash
from megalite.checkpoint.names import folder_of, is_checkpoint, list_steps
from megalite.config import RunConfig
from megalite.errors import CheckpointError
from megalite.exchange.folder import SOURCE, hf_folder, identity, open_folder, source_of

RECORD = "weights_from"  # in the trainer's state; None: from initial weights
SHA256 = "manifest_sha256"


def origin_record(source: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """The record of a run that begins with the weights of a checkpoint, named by `source`."""
    found = {"path": source, "checkpoint": str(checkpoint.path), SHA256: identity(checkpoint)}
    folder = source_of(checkpoint)
    return found if folder is None else {**found, SOURCE: folder}


def check_origin(config: RunConfig, saved: dict[str, Any], step: int, where: Path) -> str | None:
    """A line for a run that resumes although checkpoint.load_weights is set; None if it is not.

    saved: the trainer's state in the checkpoint `where` of this run. Raises CheckpointError if the
    run began from other weights.
    """
    source = config.checkpoint.load_weights
    if source is None:
        return None
    if RECORD not in saved:
        return (
            f"resumes from step {step}; checkpoint.load_weights={source} is not read, and what was "
            "at step 0 is not on record (saved by an older version)"
        )
    began: dict[str, Any] | None = saved[RECORD]
    if began is not None and (source == began["path"] or _holds(source, began)):
        return f"resumes from step {step}; checkpoint.load_weights={source} was read at step 0"
    other = "initial weights" if began is None else f"{began['path']} ({began['checkpoint']})"
    raise CheckpointError(
        f"checkpoint.load_weights={source} would not be read: {where} is there to resume from, and "
        f"its run began from {other}; remove checkpoint.load_weights to go on, or give the run "
        "another name"
    )


def _holds(source: str, began: dict[str, Any]) -> bool:
    """True if a path leads to the checkpoint that the run began from, wherever it lies now."""
    stock = hf_folder(source)
    if stock is not None:
        return stock.is_dir() and identity(open_folder(stock)) == began[SHA256]
    path = Path(source)
    found = [path] if is_checkpoint(path) else [one for _, one in list_steps(folder_of(path))]
    return any(manifest_hash(one) == began[SHA256] for one in found)
