"""A run's state in checkpoints: saved and loaded (resume.py finds and compares it first).

Weights and moments go through `megalite.checkpoint`, each rank's part as it is; everything else a
bitwise resume needs is a handful of integers, because data order, initial weights and learning rate
are functions of the step.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.save import save
from megalite.distributed.agree import Ranks
from megalite.distributed.mesh import Mesh
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.shard import EMA
from megalite.train.engine import Engine


def named_pieces(
    optimizer: DistributedOptimizer, mesh: Mesh, kinds: Collection[str] | None = None
) -> list[NamedPiece]:
    """This rank's live state as checkpoint pieces, of some kinds (None: all).

    Loading into them loads the optimizer and the model's weights.
    """
    pieces = []
    for state in optimizer.named_state():
        if kinds is None or state.kind in kinds:
            axis = mesh.axis(state.spec.grid.cut_axis)
            pieces.append(
                NamedPiece.of_shard(
                    state.kind,
                    state.spec,
                    axis.size,
                    axis.rank,
                    state.tensor,
                    state.start,
                    state.owner,
                )
            )
    return pieces


def save_run(engine: Engine, root: Path, step: int, trainer_state: dict[str, Any]) -> Path:
    """Write checkpoint `step` of a run; all ranks call it."""
    engine.optimizer.wait_params()
    topology = engine.mesh.topology
    return save(
        root,
        step,
        named_pieces(engine.optimizer, engine.mesh),
        state={"optimizer": engine.optimizer.scalars(), "trainer": trainer_state},
        config=engine.config.model_dump(mode="json"),
        layout=topology.sizes,
        ranks=Ranks(engine.mesh.world),
    )


def load_run(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fill the engine from a checkpoint; all ranks call it.

    An average of the weights that the run keeps and the checkpoint does not begins at the weights;
    one that only the checkpoint has is left out.
    """
    optimizer, mesh = engine.optimizer, engine.mesh
    saved_kinds = {name.partition("/")[0] for name in checkpoint.manifest.tensors}
    both = (EMA in saved_kinds) == (engine.config.optimizer.ema_decay is not None)
    kinds = None if both else saved_kinds - {EMA}
    load(checkpoint, named_pieces(optimizer, mesh, kinds), Ranks(mesh.world), whole_kinds=kinds)

    saved: Any = checkpoint.manifest.state
    optimizer.load_scalars(saved["optimizer"])
    if both:
        optimizer.after_load()
    else:
        optimizer.after_weights_load()
