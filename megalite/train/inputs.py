"""What a run's datasets say of themselves that its settings contradict, before torch is imported.

Reads the small files beside them only (sidecar.py); a dataset without one is judged when the ranks
open it (datasets.py), as are all of them again then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megalite.config import RunConfig
from megalite.config.inputs import sources
from megalite.data.dataset import TokenDataset
from megalite.data.indexed import file_of
from megalite.data.sidecar import require_tokenizer, stated_sidecar
from megalite.errors import DataError


def input_problems(config: RunConfig) -> list[str]:
    """One line for each dataset whose ids, and each whose tokenizer, do not fit the config.

    Files that are not there are config.inputs's to name.
    """
    paths = [source.path for source in sources(config.data)]
    paths += [entry.path for entry in config.eval.sets]
    problems: list[str] = []
    for path in dict.fromkeys(paths):
        if all(file_of(path, suffix).is_file() for suffix in (".bin", ".idx")):
            for check in (_ids, _tokenizer):
                problems += _told(check, path, config)
    return list(dict.fromkeys(problems))  # a sidecar that cannot be read is told once


def _told(check: Callable[[str, RunConfig], None], path: str, config: RunConfig) -> list[str]:
    """What a check raises, as a line."""
    try:
        check(path, config)
    except DataError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename or path}: cannot be read: {error.strerror}"]
    return []


def _ids(path: str, config: RunConfig) -> None:
    sidecar, vocab_size = stated_sidecar(path), config.model.vocab_size
    if sidecar is not None and sidecar.max_id >= vocab_size:
        # The sidecar may be of other files: those that are there have the last word.
        TokenDataset(path).check_vocab(vocab_size)


def _tokenizer(path: str, config: RunConfig) -> None:
    sidecar, tokenizer = stated_sidecar(path), config.data.tokenizer
    if sidecar is not None and tokenizer is not None and Path(tokenizer).is_file():
        require_tokenizer(sidecar, Path(path), tokenizer)
