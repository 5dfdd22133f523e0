"""Start a run from another run's weights: no moments, no step, no data position.

The weights are loaded as they were saved: fp32 masters where the other run had them. This run's
masters, averages and parameters are all set to them.
"""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.find import Checkpoint, find_latest, open_checkpoint
from megalite.checkpoint.load import load
from megalite.distributed import comm
from megalite.distributed.agree import Ranks
from megalite.distributed.mesh import Mesh
from megalite.errors import CheckpointError
from megalite.train.engine import Engine
from megalite.train.state import named_pieces

_KIND = "param/"
_MAX_NAMED = 5  # weights in an error


def load_weights(engine: Engine, source: Path) -> Checkpoint:
    """Fill the engine's weights from a run or checkpoint folder; all ranks call it.

    Raises CheckpointError if there is no sound checkpoint, if its weights are of another model (a
    name, shape or type differs), or if it holds weights that this model does not have.
    """
    checkpoint = _find(source, engine.mesh)
    pieces = named_pieces(engine.optimizer, engine.mesh, kinds=("param",))
    _require_all_used(checkpoint, [piece.name for piece in pieces], engine.mesh)
    load(checkpoint, pieces, Ranks(engine.mesh.world), allow_unused=True)
    engine.optimizer.after_weights_load()
    return checkpoint


def _find(source: Path, mesh: Mesh) -> Checkpoint:
    """`source` itself if it is a checkpoint, else the newest one of the run or of the folder."""
    ranks = Ranks(mesh.world)
    if source.name.startswith("step-"):
        return open_checkpoint(source, ranks)
    found = find_latest(source / "checkpoints", ranks) or find_latest(source, ranks)
    if found is None:
        raise CheckpointError(
            f"checkpoint.load_weights={source} holds no checkpoint; give the folder of a run that "
            "has saved, or one of its checkpoints/step-... folders"
        )
    return found


def _require_all_used(checkpoint: Checkpoint, names: list[str], mesh: Mesh) -> None:
    """Raise CheckpointError, on all ranks, for saved weights that no rank's `names` have."""
    wanted = {name for rank in comm.all_gather_object(names, mesh.world) for name in rank}
    saved = [name for name in checkpoint.manifest.tensors if name.startswith(_KIND)]
    unused = [name.removeprefix(_KIND) for name in saved if name not in wanted]
    if unused:
        more = f" and {len(unused) - _MAX_NAMED} more" if len(unused) > _MAX_NAMED else ""
        raise CheckpointError(
            f"checkpoint.load_weights: {checkpoint.path} holds weights that this model has no "
            f"place for: {', '.join(unused[:_MAX_NAMED])}{more}; use the model settings it was "
            "saved with (its manifest has them)"
        )
