"""What a run takes before it runs: stages, parameters and bytes of every rank. Knows no torch."""

from megalite.planner.activations import held_by as held_by
from megalite.planner.memory import RankMemory as RankMemory
from megalite.planner.memory import beside_tensors as beside_tensors
from megalite.planner.memory import rank_memory as rank_memory
from megalite.planner.stages import Stage as Stage
from megalite.planner.stages import stage_parameters as stage_parameters
from megalite.planner.stages import stages_of as stages_of
