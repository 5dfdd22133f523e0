"""The runs that are tried on the pretended device: a shipped model, a layout, settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """A run of a shipped config at a layout; `layers` of its layers on each pipeline rank.

    ranks: those that are recorded, one after another; all of them if empty. steps: how many each
    takes. measured: the clock splits the time of each step, as it does of those with a line.
    share_edge: the mistake that the mesh avoids, one communicator for the edge and the gather of
    parameters.
    """

    name: str
    config: str = "models/llama-8b"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    layers: int = 1
    micro_batches: int = 2
    seq_length: int = 1024
    settings: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    steps: int = 2
    measured: bool = False
    share_edge: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def deeper(self) -> Case:
        """The first rank with twice as many layers, so that the difference is what layers cost."""
        return replace(self, layers=2 * self.layers, ranks=self.ranks[:1])

    def overrides(self, data: str) -> Sequence[str]:
        """The settings on top of the shipped config; `data` is a dataset's prefix."""
        return [
            f"parallel.tp={self.tp}",
            f"parallel.pp={self.pp}",
            f"parallel.vpp={self.vpp}",
            f"parallel.dp={self.dp}",
            f"parallel.sequence_parallel={'true' if self.tp > 1 else 'false'}",
            *(["parallel.head_layers=0"] if self.pp > 1 else []),
            f"model.num_layers={self.layers * self.pp}",
            f"data.path={data}",
            "data.tokenizer=none",
            f"data.seq_length={self.seq_length}",
            "data.split=1,0",
            "eval.interval=0",
            f"train.global_batch={self.micro_batches * self.dp}",
            "train.micro_batch=1",
            "train.steps=10",
            "train.dtype=bfloat16",
            f"log.interval={1 if self.measured else 10}",
            "name=pretended",
            *self.settings,
        ]
