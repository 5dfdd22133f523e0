"""A run's state in checkpoints: what is saved, what is checked when it comes back.

Weights and moments go through `megalite.checkpoint`, rank by rank as they lie; everything else a
bitwise resume needs is a handful of integers, because data order, initial weights and learning rate
are functions of the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.find import Checkpoint, find_latest
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.ranks import GroupRanks, Ranks, SingleRank
from megalite.checkpoint.save import save
from megalite.config import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.errors import CheckpointError
from megalite.train.engine import Engine

# Sections and keys that may differ between the run that saved and the run that resumes.
_FREE_SECTIONS = ("name", "out", "log", "eval", "checkpoint", "parallel", "pipeline")
_FREE_KEYS = (
    "train.micro_batch",
    "train.recompute",
    "train.loss_chunk_tokens",
    "train.timeout_s",
    "data.path",
    "data.tokenizer",
    "optimizer.zero",
    "optimizer.bucket_mb",
    "optimizer.overlap_grad_reduce",
    "optimizer.overlap_param_gather",
    "optimizer.non_finite",
    "optimizer.max_skips",
)

_LR_END = "the end of the learning rate's decay (optimizer.decay_steps, else train.steps)"


def ranks_of(mesh: Mesh) -> Ranks:
    """All ranks of the mesh, as checkpoints need them."""
    return SingleRank() if mesh.world.size == 1 else GroupRanks(device=mesh.device)


def named_pieces(engine: Engine) -> list[NamedPiece]:
    """This rank's live state as checkpoint pieces; loading into them loads the engine."""
    tp = engine.mesh.tp
    return [
        NamedPiece.of_shard(
            state.name.split("/", 1)[0],
            state.spec,
            tp.size,
            tp.rank,
            state.tensor,
            state.start,
            state.owner,
        )
        for state in engine.optimizer.named_state()
    ]


def save_run(engine: Engine, root: Path, step: int, trainer_state: dict[str, Any]) -> Path:
    """Write checkpoint `step` of a run; all ranks call it."""
    engine.optimizer.wait_params()
    topology = engine.mesh.topology
    return save(
        root,
        step,
        named_pieces(engine),
        state={"optimizer": engine.optimizer.scalars(), "trainer": trainer_state},
        config=engine.config.model_dump(mode="json"),
        layout={name: getattr(topology, name) for name in ("tp", "cp", "dp", "pp")},
        ranks=ranks_of(engine.mesh),
    )


def find_run(root: Path, mesh: Mesh) -> Checkpoint | None:
    """The newest sound checkpoint of a run, or None; all ranks call it."""
    return find_latest(root, ranks_of(mesh))


def load_run(engine: Engine, checkpoint: Checkpoint) -> dict[str, Any]:
    """Fill the engine and return the trainer's state; all ranks call it.

    Raises CheckpointError when the run's settings would make the resumed run another run.
    """
    refuse_changed_settings(engine.config, checkpoint)
    load(checkpoint, named_pieces(engine), ranks_of(engine.mesh))
    saved: dict[str, Any] = checkpoint.manifest.state
    engine.optimizer.load_scalars(saved["optimizer"])
    engine.optimizer.after_load()
    trainer: dict[str, Any] = saved["trainer"]
    return trainer


def refuse_changed_settings(config: RunConfig, checkpoint: Checkpoint) -> None:
    """CheckpointError with a line per setting that differs and decides what the run computes."""
    old: Any = checkpoint.manifest.config
    saved, now = _settings(old), _settings(config.model_dump(mode="json"))
    names = [n for n in now if n.split(".")[0] not in _FREE_SECTIONS and n not in _FREE_KEYS]
    changed = [
        f"{name} is {now[name]!r}, {checkpoint.path.name} was saved with {saved.get(name)!r}"
        for name in names
        if now[name] != saved.get(name)
    ]
    if changed:
        raise CheckpointError(
            "; ".join(changed)
            + "; restore the settings, or start a run with another name"
            + _how_to_extend(now, saved)
        )


def _how_to_extend(now: dict[str, Any], saved: dict[str, Any]) -> str:
    if now[_LR_END] == saved.get(_LR_END):
        return ""
    return (
        f"; to train for longer, keep the learning rate's curve with "
        f"optimizer.decay_steps={saved.get(_LR_END)}"
    )


def _settings(tree: dict[str, Any]) -> dict[str, Any]:
    """Dotted settings; of the two that may end the decay, only `train.steps` where they do.

    A run may be made longer or shorter unless that would move its learning rate.
    """
    flat = _flat(tree)
    decay_steps = flat.pop("optimizer.decay_steps")
    if flat["optimizer.lr_schedule"] == "constant":
        flat["train.steps"] = None
    elif decay_steps is not None:
        flat["train.steps"] = decay_steps
    return {_LR_END if name == "train.steps" else name: value for name, value in flat.items()}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            result.update(_flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result
