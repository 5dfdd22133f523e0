"""Start a run from other weights: no moments, no step, no data position.

They come from another run, whose fp32 masters are taken where it had them, or from a Hugging Face
folder. This run's masters, averages and parameters are all set to them.
"""

from __future__ import annotations

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.shard_file import dtype_name
from megalite.config import RunConfig
from megalite.config.meaning import same_meaning
from megalite.config.names import keys, toml_value, value_of
from megalite.config.saved import saved_config
from megalite.distributed.agree import Ranks, on_all_ranks
from megalite.errors import CheckpointError
from megalite.exchange.folder import open_weights
from megalite.train.changes import require_same_function
from megalite.train.engine import Engine
from megalite.train.state import named_pieces
from megalite.wording import number_of


def load_weights(
    engine: Engine, named: str, accept: frozenset[str] = frozenset()
) -> tuple[Checkpoint, list[str]]:
    """Fill the engine's weights from a run, a checkpoint or `hf:FOLDER`; all ranks call it.

    Returns the source and lines that say what was read and how it was changed. accept: settings of
    the model that may differ from the source's. Raises CheckpointError if there is no sound
    checkpoint, if its settings cannot be read or are not accepted, or if its weights are of another
    model: a name or shape differs, or it holds more.
    """
    ranks, config = Ranks(engine.mesh.world), engine.config
    try:
        checkpoint = open_weights(named, ranks)
        saved = saved_config(checkpoint.manifest.config, str(checkpoint.path))
        differing = on_all_ranks(
            ranks, lambda: require_same_function(saved, config, accept, str(checkpoint.path)), named
        )
        pieces = named_pieces(engine.optimizer, engine.mesh, kinds=("param",))
        vocab = saved.model.vocab_size
        try:
            load(checkpoint, pieces, ranks, whole_kinds=("param",), vocab_size=vocab)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{_other_model(saved, config)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.load_weights={named}: {error}") from error
    engine.optimizer.after_weights_load()

    kept = {dtype_name(piece.data.dtype) for piece in pieces}
    return checkpoint, [
        f"weights from {checkpoint.path}, everything else new",
        *checkpoint.notes,
        *(f"accepted: {text}" for text in differing),
        *_fitted(checkpoint, saved, config, kept),
    ]


def _fitted(
    checkpoint: Checkpoint, saved: RunConfig, config: RunConfig, kept: set[str]
) -> list[str]:
    """A line for each change of the weights' types and of the vocabulary's rows."""
    weights = [t for n, t in checkpoint.manifest.tensors.items() if n.startswith("param/")]
    lines = []
    for found in sorted({tensor.dtype for tensor in weights} - kept):
        how = "narrowed" if found == "float64" else "widened"
        lines.append(f"weights are {found}, {how} to {', '.join(sorted(kept))}")
    grown = config.model.vocab_size - saved.model.vocab_size
    if grown:
        lines.append(
            f"vocabulary of {saved.model.vocab_size} grows by {number_of(grown, 'token')}, whose "
            "rows are the mean of the others"
        )
    return lines


def _other_model(saved: RunConfig, config: RunConfig) -> str:
    """Lines with the model settings in which two configs differ."""
    return "".join(
        f"\n{name} is {toml_value(value_of(config, name))}, saved with "
        f"{toml_value(value_of(saved, name))}"
        for name in keys()
        if name.startswith("model.") and not same_meaning(saved, config, name)
    )
