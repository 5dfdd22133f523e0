"""Start a run from another run's weights: no moments, no step, no data position.

The weights are loaded as they were saved: fp32 masters where the other run had them. This run's
masters, averages and parameters are all set to them.
"""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.find import Checkpoint, find_checkpoint
from megalite.checkpoint.load import load
from megalite.config import RunConfig
from megalite.config.meaning import same_meaning
from megalite.config.names import keys, toml_value, value_of
from megalite.config.saved import saved_config
from megalite.distributed.agree import Ranks
from megalite.errors import CheckpointError
from megalite.train.engine import Engine
from megalite.train.state import named_pieces


def load_weights(engine: Engine, source: Path) -> Checkpoint:
    """Fill the engine's weights from a run or checkpoint folder; all ranks call it.

    Raises CheckpointError if there is no sound checkpoint, if its settings cannot be read, or if
    its weights are of another model: a name, shape or type differs, or it holds more.
    """
    ranks = Ranks(engine.mesh.world)
    try:
        checkpoint = find_checkpoint(source, ranks)
        saved = saved_config(checkpoint.manifest.config, str(checkpoint.path))
        pieces = named_pieces(engine.optimizer, engine.mesh, kinds=("param",))
        try:
            load(checkpoint, pieces, ranks, whole_kinds=("param",))
        except CheckpointError as error:
            raise CheckpointError(f"{error}{_other_model(saved, engine.config)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.load_weights={source}: {error}") from error
    engine.optimizer.after_weights_load()
    return checkpoint


def _other_model(saved: RunConfig, config: RunConfig) -> str:
    """Lines with the model settings in which two configs differ."""
    return "".join(
        f"\n{name} is {toml_value(value_of(config, name))}, saved with "
        f"{toml_value(value_of(saved, name))}"
        for name in keys()
        if name.startswith("model.") and not same_meaning(saved, config, name)
    )
