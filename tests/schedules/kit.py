"""An oracle for lowered programs that shares nothing with the checker.

It runs a program on symbols instead of tensors, picking ranks at random: messages are taken from
each directed channel first in, first out, whatever their names say, as a network would. A program
is good if every stage ends up with the gradients one process would have added, in that order.
"""

import random
from collections import deque
from typing import Any

from megalite.schedules import Schedule

Symbol = tuple[Any, ...]  # what a tensor was made by: the operation, its place and its inputs
Place = tuple[int, int]  # stage, microbatch


def forward_symbol(stage, mb):
    return ("x", mb) if stage < 0 else ("F", stage, mb, forward_symbol(stage - 1, mb))


def gradient_symbol(stage, mb, num_stages):
    if stage == num_stages:
        return ("ones",)
    above = gradient_symbol(stage + 1, mb, num_stages)
    return ("B", stage, mb, forward_symbol(stage - 1, mb), above)


class Rank:
    def __init__(self, program: Schedule, index: int, channels: dict[Any, list[Symbol]]) -> None:
        self.program, self.index, self.channels = program, index, channels
        self.actions = deque(program.ranks[index])
        self.outputs: dict[Place, Symbol] = {}
        self.inputs: dict[Place, Symbol] = {}
        self.gradients: dict[Place, Symbol] = {}
        self.pending: dict[Place, Symbol] = {}
        self.posted: dict[Any, tuple[Any, int]] = {}  # action -> its number on its channel
        self.sums: dict[int, list[Symbol]] = {}
        self.reduced: dict[int, list[Symbol]] = {}

    def value(self, table, key, remote):
        """A local value, or a message if it is there; None while it is under way."""
        if key in table:
            return table[key]
        edge, number = self.posted[remote]
        messages = self.channels.get(edge, [])
        return messages[number] if number < len(messages) else None

    def step(self) -> bool:
        """Run one action; False if its message is still under way. KeyError: a bad program."""
        kind, stage, mb = action = self.actions[0]
        last = self.program.num_stages - 1
        if kind in ("RF", "RB"):
            edge = self.program.edge_of(action)
            number = sum(1 for used, _ in self.posted.values() if used == edge)
            if action in self.posted:
                raise KeyError(action)
            self.posted[action] = (edge, number)
        elif kind in ("SF", "SB"):
            table = self.outputs if kind == "SF" else self.gradients
            self.channels.setdefault(self.program.edge_of(action), []).append(table[stage, mb])
        elif kind == "F":
            above = ("x", mb)
            if stage > 0:
                above = self.value(self.outputs, (stage - 1, mb), ("RF", stage, mb))
            if above is None:
                return False
            self.inputs[stage, mb] = above
            self.outputs[stage, mb] = ("F", stage, mb, above)
        elif kind in ("B", "BW"):
            grad = ("ones",)
            if stage < last:
                grad = self.value(self.gradients, (stage + 1, mb), ("RB", stage, mb))
            if grad is None:
                return False
            self.gradients[stage, mb] = ("B", stage, mb, self.inputs.pop((stage, mb)), grad)
            self.pending[stage, mb] = self.gradients[stage, mb]
        if kind in ("W", "BW"):
            self.sums.setdefault(stage, []).append(self.pending.pop((stage, mb)))
        if kind == "REDUCE":
            if stage in self.reduced:
                raise KeyError(action)
            self.reduced[stage] = list(self.sums[stage])
        self.actions.popleft()
        return True


def good(program: Schedule, seed: int) -> bool:
    """Does the program do the right thing under one random order of the ranks?"""
    channels: dict[Any, list[Symbol]] = {}
    ranks = [Rank(program, index, channels) for index in range(program.p)]
    order = random.Random(seed)
    try:
        while any(rank.actions for rank in ranks):
            order.shuffle(ranks)
            if not any(rank.step() for rank in ranks if rank.actions):
                return False
    except KeyError:
        return False
    taken = sum(len(rank.posted) for rank in ranks)
    if taken != sum(map(len, channels.values())) or any(r.inputs or r.pending for r in ranks):
        return False
    reduced = {stage: sums for rank in ranks for stage, sums in rank.reduced.items()}
    return reduced == {
        stage: [gradient_symbol(stage, mb, program.num_stages) for mb in range(program.m)]
        for stage in range(program.num_stages)
    }
