"""A run's memory, planned without torch: bytes of weights, states and activations of every rank.

Reading order: states (weights, gradients, optimizer), activations (one microbatch of a stage),
memory (both together, over a schedule).
"""

from megalite.planner.activations import microbatch_bytes as microbatch_bytes
from megalite.planner.memory import RankMemory as RankMemory
from megalite.planner.memory import beside_tensors as beside_tensors
from megalite.planner.memory import rank_memory as rank_memory
