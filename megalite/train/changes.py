"""Changes of settings and data between a checkpoint and now, and the check that they are allowed.

config/resume.py has the table of settings that may change, config/meaning.py the meaning of a
setting: an open setting that is written out is no change. A run may be made longer or shorter, and
its decay moved, as long as no step's learning rate changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.manifest import Manifest
from megalite.config import RunConfig
from megalite.config.inputs import sources
from megalite.config.meaning import function_settings, same_meaning
from megalite.config.names import keys, toml_value, value_of
from megalite.config.resume import ALL_LISTED, DATA, HORIZON, Change, may_change
from megalite.config.shares import MAX_PARTS
from megalite.data.fingerprint import WHOLE_BYTES
from megalite.errors import CheckpointError
from megalite.run.batch_plan import BatchPlan, BatchStage, batch_plan, horizon_steps
from megalite.run.lr_phases import LrPhases, lr_phases
from megalite.run.parameters import stage_parameters, whole_model
from megalite.run.rules import rule_of
from megalite.wording import number_of


@dataclass(frozen=True)
class Changed:
    """A setting that differs, and the permission that the change `needs`."""

    name: str
    old: Any
    new: Any
    needs: Change
    note: str = ""

    @property
    def text(self) -> str:
        """The change in words, with both values."""
        return (
            f"{self.name} is {toml_value(self.new)}, saved with {toml_value(self.old)}{self.note}"
        )


def trainer_state(checkpoint: Manifest, where: Path) -> dict[str, Any]:
    """The trainer's state in a checkpoint. Raises CheckpointError if it holds weights alone."""
    found: Any = checkpoint.state.get("trainer")
    if found is None:
        raise CheckpointError(
            f"{where} holds weights alone, no run to resume; give the run another name, and begin "
            f"from them with checkpoint.load_weights={where}"
        )
    return dict(found)


def resumed_plan(config: RunConfig, saved: Any, where: Path) -> tuple[int, BatchPlan]:
    """The step of the checkpoint `where`, whose state is `saved`, and the plan that continues it.

    Raises CheckpointError for a checkpoint that is beyond the run's end.
    """
    step = int(saved["step"])
    plan = batch_plan(config, [BatchStage(*stage) for stage in saved["stages"]], step)
    steps = horizon_steps(config, plan)
    if step > steps:
        raise CheckpointError(
            f"{where} is beyond train.steps={steps}; raise train.steps, "
            "or start a run with another name"
        )
    return step, plan


def changed_settings(
    old: RunConfig, new: RunConfig, plan: BatchPlan, step: int, has_order: bool = True
) -> list[Changed]:
    """The settings that differ between a checkpoint of `step` (`old`) and now (`new`, `plan`).

    has_order: False counts data.sources as changed, since weights are rounded that were not then.
    """
    old_plan = batch_plan(old, plan.before(step), step)
    before, now = _phases(old, old_plan), _phases(new, plan)
    position = step if now.unit == "steps" else plan.first_sample(step) * new.data.seq_length
    rates_change = not _same_rates(before, now, new.optimizer.lr_schedule, position)
    # A curve that ends at 0 has nothing to train for longer with.
    keep_curve = f"to train for longer only, keep its curve with optimizer.decay_{before.unit}="
    horizon_note = (
        f" (the learning rate's decay ends after {before.end} {before.unit}"
        f"{f'; {keep_curve}{before.end}' if old.optimizer.min_lr else ', at 0'})"
    )
    order_note = (
        f" (saved by a version that did not round weights to 1/{MAX_PARTS}: its order is not kept; "
        "each source goes on behind its share of the "
        f"{number_of(plan.first_sample(step), 'sample')} taken, "
        "give or take one)"
    )
    changed = []
    for name in keys():
        is_other_order = name == "data.sources" and not has_order
        if same_meaning(old, new, name) and not is_other_order:
            continue
        needs, note = may_change(name), order_note if is_other_order else ""
        if name in HORIZON and rates_change:
            needs, note = "accept", horizon_note
        elif name in HORIZON:
            needs = "free"
        if needs == "accept" and (unfit := _why_unfit(old, new, name)):
            needs, note = "never", f" ({unfit})"
        changed.append(Changed(name, _comparable(old, name), _comparable(new, name), needs, note))
    return changed


def changed_data(old: dict[str, Any], new: dict[str, Any]) -> list[Changed]:
    """Datasets whose content differs, by the names of sources and evaluation sets.

    A dataset that is only in `old` or `new` is a change of settings. The fingerprint of a large
    token file covers some blocks only, so for one that was written to since, with the same
    fingerprint, it is not known whether it changed: such a change is `free`, but reported.
    """
    changed = []
    for name in [name for name in new if name in old]:
        was, now = old[name], new[name]
        if was["fingerprint"] != now["fingerprint"]:
            note = f" (fingerprints of {name}, {now['path']}; its content is another now)"
            changed.append(Changed(DATA, was["fingerprint"], now["fingerprint"], "accept", note))
        elif was["mtime_ns"] != now["mtime_ns"] and now["num_bytes"] > WHOLE_BYTES:
            note = f" (time of {now['path']}.bin; written to or copied, the blocks compared agree)"
            changed.append(Changed(DATA, was["mtime_ns"], now["mtime_ns"], "free", note))
    return changed


def require_accepted(changed: Sequence[Changed], accept: frozenset[str], where: str) -> None:
    """Raise CheckpointError, a line for each change, unless all are free or accepted."""
    never = [c for c in changed if c.needs == "never"]
    listed = [c for c in changed if c.needs == "accept"]
    refused = [c for c in listed if c.name not in accept and ALL_LISTED not in accept]
    if not never and not refused:
        return
    lines = [f"{where} was saved with other settings"]
    lines += [c.text if c.note else f"{c.text} (cannot change within a run)" for c in never]
    lines += [c.text for c in refused]
    if not never:
        names = ",".join(c.name for c in listed)
        lines.append(
            f"restore the settings, start a run with another name, or change them from here on "
            f"with --accept {names}"
        )
    else:
        lines.append("restore the settings, or start a run with another name")
    raise CheckpointError("\n".join(lines))


def require_same_function(
    saved: RunConfig, config: RunConfig, accept: frozenset[str], where: str
) -> list[str]:
    """The model settings that differ from those of the weights `where`, in words, all accepted.

    Raises CheckpointError with a line for each if one is not. Settings that decide the shapes of
    weights are left to the loading, which names the tensor.
    """
    old, new = function_settings(saved), function_settings(config)
    missing = object()
    pairs = {name: (value_of(saved, name), value_of(config, name)) for name in {**old, **new}}
    # One that is written alike differs only by what it is derived from, which is named itself.
    changed = [
        Changed(name, *pair, "accept")
        for name, pair in pairs.items()
        if old.get(name, missing) != new.get(name, missing) and pair[0] != pair[1]
    ]
    if _shapes(saved) != _shapes(config):
        return []
    refused = [one for one in changed if one.name not in accept and ALL_LISTED not in accept]
    if refused:
        names = ",".join(one.name for one in changed)
        lines = [f"{where} holds the weights of another model", *(one.text for one in refused)]
        lines.append(f"set these as saved, or use the weights all the same with --accept {names}")
        raise CheckpointError("\n".join(lines))
    return [one.text for one in changed]


def _shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's weights; of a vocabulary's table without its rows."""
    specs = stage_parameters(config.model, whole_model(config.model))
    return {s.name: s.shape if s.num_true_rows is None else s.shape[1:] for s in specs}


def unused(changed: Sequence[Changed], accept: frozenset[str]) -> list[str]:
    """The names in `accept` that did not change."""
    return sorted(accept - {c.name for c in changed} - {ALL_LISTED})


def as_records(changed: Sequence[Changed]) -> list[dict[str, Any]]:
    """The changes as entries of the restart line of metrics.jsonl."""
    return [
        {"key": c.name, "old": c.old, "new": c.new, "accepted": c.needs == "accept"}
        for c in changed
    ]


def _why_unfit(old: RunConfig, new: RunConfig, name: str) -> str:
    """The reason why a checkpoint of `old` would not fit `new` by this setting; "" if it does."""
    if name == "train.dtype" and "float64" in (old.train.dtype, new.train.dtype):
        return "cannot change within a run: its numbers are saved in float64 or in float32"
    if name == "optimizer.groups" and _algorithms(old) != _algorithms(new):
        return "cannot change within a run: AdamW and Muon keep other moments of a parameter"
    return ""


def _algorithms(config: RunConfig) -> list[str]:
    """The algorithm that updates each parameter."""
    specs = stage_parameters(config.model, whole_model(config.model), sequence_parallel=False)
    return [rule_of(spec, config.optimizer).algorithm for spec in specs]


def _same_rates(before: LrPhases, now: LrPhases, schedule: str, position: int) -> bool:
    """True if the rates of all steps, past and future, are the same under both horizons.

    `position`: the place of the checkpoint, in the unit of `now`.
    """
    if schedule in ("constant", "inverse_sqrt"):
        return True
    if schedule == "wsd" and before.unit == now.unit:
        # The plateau may get another length while the run is still on it.
        return position <= min(before.decay_start, now.decay_start) or before == now
    return (before.unit, before.decay_start, before.end) == (now.unit, now.decay_start, now.end)


def _phases(config: RunConfig, plan: BatchPlan) -> LrPhases:
    length = config.data.seq_length
    steps = horizon_steps(config, plan)
    return lr_phases(config.optimizer, steps, lambda step: plan.first_sample(step) * length)


def _comparable(config: RunConfig, name: str) -> Any:
    """A setting as JSON gives it back; sources without their paths, which are free to move."""
    if name == "data.sources" and config.data.sources:  # not data.path, which `sources` returns too
        return [{"name": s.name, "weight": str(s.weight)} for s in sources(config.data)]
    return _plain(value_of(config, name))


def _plain(value: Any) -> Any:
    """A setting as JSON gives it back."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
