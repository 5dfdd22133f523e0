"""Checks of a run's settings against the sidecars of its datasets, before torch is imported.

Sidecars are the small files beside datasets (data/sidecar.py). When the ranks open the data, all
datasets are checked themselves, also those without a sidecar (run_data.py). Every byte of files of
up to CHECKED_BYTES is read here; of larger ones the fingerprint stands for the whole, as a start
must not take minutes, and `megalite data inspect` reads the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megalite.config import RunConfig
from megalite.config.inputs import sources
from megalite.data.dataset import TokenDataset
from megalite.data.indexed import file_of
from megalite.data.sidecar import require_checksum, require_tokenizer, stated_sidecar
from megalite.errors import DataError

CHECKED_BYTES = 1 << 30  # read and summed in less than a second


def sidecar_problems(config: RunConfig) -> list[str]:
    """One line for each dataset that is damaged, or whose ids or tokenizer do not fit the config.

    Missing files are left out: `config.inputs.missing_inputs` names them.
    """
    paths = [source.path for source in sources(config.data)]
    paths += [entry.path for entry in config.eval.sets]
    problems: list[str] = []
    for path in dict.fromkeys(paths):
        if all(file_of(path, suffix).is_file() for suffix in (".bin", ".idx")):
            for check in (_check_content, _check_tokenizer):
                problems += _lines_of(check, path, config)
    return list(dict.fromkeys(problems))  # both checks may fail to read one sidecar


def _lines_of(check: Callable[[str, RunConfig], None], path: str, config: RunConfig) -> list[str]:
    """The error that a check raises, as a line; none if it passes."""
    try:
        check(path, config)
    except DataError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename or path}: cannot be read: {error.strerror}"]
    return []


def _check_content(path: str, config: RunConfig) -> None:
    if stated_sidecar(path) is None:
        return
    dataset = TokenDataset(path)
    sidecar, indexed = dataset.sidecar, dataset.indexed
    assert sidecar is not None
    if indexed.bin_path.stat().st_size + indexed.idx_path.stat().st_size <= CHECKED_BYTES:
        require_checksum(sidecar, indexed)

    # What the sidecar states of the ids is cheap to compare; the dataset itself decides.
    if sidecar.max_id >= config.model.vocab_size:
        dataset.check_vocab(config.model.vocab_size)


def _check_tokenizer(path: str, config: RunConfig) -> None:
    sidecar, tokenizer = stated_sidecar(path), config.data.tokenizer
    if sidecar is not None and tokenizer is not None and Path(tokenizer).is_file():
        require_tokenizer(sidecar, Path(path), tokenizer)
