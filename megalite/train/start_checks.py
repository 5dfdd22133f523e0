"""Checks of what a run starts from, before torch is imported: datasets, run folder, checkpoint.

The ranks check them again, since each may see another disk (run_data.py, resume.py), and with what
needs torch. Every byte of a dataset whose sidecar has a checksum is read here, where its files have
up to CHECKED_BYTES; of larger ones the fingerprint stands for the whole, as a start must not take
minutes, and `megalite data inspect` reads the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.checkpoint.find import find_checkpoint
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.names import checkpoints_of, list_steps, meant_runs
from megalite.checkpoint.store import check_sizes
from megalite.config import RunConfig
from megalite.config.inputs import NO_DATA, dataset_paths, sources
from megalite.config.resume import require_resume_mode
from megalite.config.saved import saved_config
from megalite.data.dataset import TokenDataset
from megalite.data.indexed import file_of
from megalite.data.inputs import packing_of, require_own_tokenizer, split_source, whole_set
from megalite.data.sidecar import require_checksum
from megalite.errors import CheckpointError, DataError
from megalite.exchange.folder import hf_folder, read_folder
from megalite.layout.topology import Topology
from megalite.process.launcher import Launch
from megalite.train.changes import (
    changed_settings,
    require_accepted,
    require_same_function,
    resumed_plan,
    trainer_state,
)
from megalite.train.origin import check_origin
from megalite.wording import number_of

CHECKED_BYTES = 1 << 30  # read and summed in less than a second


def launcher_problems(config: RunConfig, launch: Launch, local: bool) -> list[str]:
    """A line if a launcher started what starts its own ranks, or none started what has several.

    local: this process starts all ranks. The number of processes that a launcher started is a
    world size, which `checks.settings` compares.
    """
    started = launch.source != "single"
    if local and started:
        return [
            f"--local starts its own processes, but {launch.source} already started this one as "
            f"rank {launch.rank} of {launch.world_size}; leave one of the two out"
        ]
    layout = Topology.of(config.parallel)
    if local or started or layout.world_size == 1:
        return []
    return [
        f"parallel.tp={layout.tp} x parallel.pp={layout.pp} x parallel.dp={layout.dp} needs "
        f"{number_of(layout.world_size, 'process')}, this is 1; add --local to start them "
        "here, or start with "
        f"torchrun --nproc-per-node={layout.world_size} --no-python megalite train ..."
    ]


def start_problems(config: RunConfig) -> list[str]:
    """One line for each dataset or folder that is damaged, does not fit or cannot be used.

    Missing files are left out: `config.inputs.missing_inputs` names them.
    """
    return [
        *_data_problems(config),
        *_folder_problems(config),
        *_resume_problems(config),
        *_weights_problems(config),
    ]


def require_resumable(config: RunConfig, accept: frozenset[str]) -> None:
    """Raise CheckpointError where what the run starts from is of other settings or other weights.

    config: resolved. A checkpoint that is damaged is left to the ranks, which look for a sound one.
    """
    steps = list_steps(checkpoints_of(config.folder))
    named = config.checkpoint.load_weights
    if not steps and named is not None:
        _require_same_function(config, named, accept)
    if not steps:
        return
    _, path = steps[-1]
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest, list(manifest.files))
    except CheckpointError:
        return
    saved = trainer_state(manifest, path)
    step, plan = resumed_plan(config, saved, path)
    old = saved_config(manifest.config, str(path))
    require_accepted(changed_settings(old, config, plan, step), accept, path.name)
    check_origin(config, saved, step, path)


def _require_same_function(config: RunConfig, named: str, accept: frozenset[str]) -> None:
    """Compare the model with the weights that it begins from, as far as they can be read here."""
    stock = hf_folder(named)
    try:
        if stock is not None:
            saved = read_folder(stock).config
        else:
            saved = saved_config(find_checkpoint(Path(named), verify="size").manifest.config, named)
    except CheckpointError:
        return  # the ranks report it
    require_same_function(saved, config, accept, named)


def _data_problems(config: RunConfig) -> list[str]:
    problems: list[str] = [] if sources(config.data) else [NO_DATA]
    for path in dict.fromkeys(path for _, path in dataset_paths(config)):
        if all(file_of(path, suffix).is_file() for suffix in (".bin", ".idx")):
            problems += _dataset_problems(path, config)
    return problems


def _dataset_problems(path: str, config: RunConfig) -> list[str]:
    """Everything that is wrong with one dataset. It is opened once: that reads much of it."""
    problems: list[str] = []
    dataset: TokenDataset | None = None
    with _collected(problems, path):
        dataset = TokenDataset(path)
    if dataset is not None:
        for check in (_check_content, _check_ids, _check_tokenizer, _check_samples):
            with _collected(problems, path):
                check(dataset, path, config)
    return problems


@contextmanager
def _collected(problems: list[str], path: str) -> Iterator[None]:
    """Within it an error about the dataset at `path` becomes a line of `problems`."""
    try:
        yield
    except DataError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{error.filename or path}: cannot be read: {error.strerror}")


def _check_content(dataset: TokenDataset, path: str, config: RunConfig) -> None:
    sidecar, indexed = dataset.sidecar, dataset.indexed
    size = sum(file.stat().st_size for file in indexed.files)
    if sidecar is not None and size <= CHECKED_BYTES:
        require_checksum(sidecar, indexed)


def _check_ids(dataset: TokenDataset, path: str, config: RunConfig) -> None:
    dataset.check_vocab(config.model.vocab_size)


def _check_tokenizer(dataset: TokenDataset, path: str, config: RunConfig) -> None:
    if config.data.tokenizer is not None and Path(config.data.tokenizer).exists():
        require_own_tokenizer(dataset, config)


def _check_samples(dataset: TokenDataset, path: str, config: RunConfig) -> None:
    """Sequences that are too long for the data."""
    for source in sources(config.data):
        if source.path == path:
            split_source(dataset, source, config)
    for entry in config.eval.sets:
        if entry.path == path:
            whole_set(dataset, entry.name).require_samples(packing_of(config))


def _folder_problems(config: RunConfig) -> Iterator[str]:
    """The reason why a run folder cannot be made or written to."""
    folder = config.folder
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    inside = [checkpoints_of(folder), folder / "metrics.jsonl"]
    if not nearest.is_dir():
        reason = f"{nearest} is no folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"{nearest} may not be written to"
    elif inside[0].exists() and not inside[0].is_dir():
        reason = f"{inside[0]} is no folder"
    elif inside[1].is_dir():
        reason = f"{inside[1]} is a folder"
    else:
        return
    yield (
        f"run folder {folder} cannot be written: {reason}; change out={config.out} or "
        f"name={config.name}"
    )


def _resume_problems(config: RunConfig) -> Iterator[str]:
    """A line if the names in the run's folder contradict checkpoint.resume.

    A checkpoint may still turn out to be damaged when the ranks read it.
    """
    root = checkpoints_of(config.folder)
    found = list_steps(root)
    try:
        require_resume_mode(config.checkpoint.resume, root, found[-1][1].name if found else None)
    except CheckpointError as error:
        yield f"{error}"


def _weights_problems(config: RunConfig) -> Iterator[str]:
    """A line for weights to begin from that are not there; a run that has saved needs none."""
    weights = config.checkpoint.load_weights
    if weights is None or list_steps(checkpoints_of(config.folder)):
        return
    stock = hf_folder(weights)
    if stock is not None:
        try:
            read_folder(stock)
        except CheckpointError as error:
            yield from str(error).splitlines()
    elif not Path(weights).exists():
        meant = " or ".join(map(str, meant_runs(Path(weights))))
        yield (
            f"checkpoint.load_weights={weights}: no such folder below {Path.cwd()}; "
            f"{f'did you mean {meant}? ' if meant else ''}give a run's folder or one of its "
            "checkpoints"
        )
