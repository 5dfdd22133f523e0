"""What a run takes before it runs: stages, parameters and bytes of every rank. Knows no torch."""

from megalite.planner.activations import held_by as held_by
from megalite.planner.memory import RankMemory as RankMemory
from megalite.planner.memory import beside_tensors as beside_tensors
from megalite.planner.memory import rank_memory as rank_memory
