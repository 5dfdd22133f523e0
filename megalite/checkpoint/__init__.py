"""Checkpoints that any layout writes and any layout reads. No pickle anywhere.

Reading order: pieces (what a rank hands in), manifest (what is written down), shard_file (where
the numbers lie), save, find, load, store (which directories there are). Knows named tensors and
their place in the global tensor; knows no model, optimizer or trainer.
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
