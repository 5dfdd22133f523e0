"""Checkpoints that any layout writes and any layout reads. No pickle anywhere.

A checkpoint is a directory with one safetensors file per rank (its shard) and one manifest. Reading
order: pieces (the tensors that a rank passes in), manifest (the description on disk), shard_file
(the numbers on disk), ranks (the exchanges between ranks), save, find, load, store (the directories
of a run), disk. Works on named tensors and their place in the global tensor; independent of model,
optimizer and trainer.
"""

from megalite.checkpoint.find import Checkpoint, find_latest, open_checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.ranks import GroupRanks, Ranks, SingleRank
from megalite.checkpoint.save import save
from megalite.checkpoint.store import discard_after, list_steps, prune, step_name

__all__ = [
    "Checkpoint",
    "GroupRanks",
    "NamedPiece",
    "Ranks",
    "SingleRank",
    "discard_after",
    "find_latest",
    "list_steps",
    "load",
    "open_checkpoint",
    "prune",
    "save",
    "step_name",
]
