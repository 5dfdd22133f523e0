"""The tokenizer's files in the run folder, so that a copied run still reads and writes text.

Their folder there has the tokenizer's hash in its name, so that a run that goes on with another
tokenizer keeps both; each checkpoint names its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.find import Checkpoint
from megalite.config import RunConfig
from megalite.data.tokenizer import Tokenizer, open_tokenizer
from megalite.data.tokenizer_files import TokenizerFiles, read_tokenizer_files
from megalite.errors import ConfigError, DataError
from megalite.wording import number_of

RECORD = "tokenizer"  # key of the record in a checkpoint's trainer state


def tokenizer_files(config: RunConfig) -> TokenizerFiles | None:
    """The files of the config's tokenizer; None if it names none."""
    return None if config.data.tokenizer is None else read_tokenizer_files(config.data.tokenizer)


def tokenizer_record(files: TokenizerFiles | None) -> dict[str, str] | None:
    """The tokenizer's folder in the run folder and its sha256, as a checkpoint keeps them."""
    if files is None:
        return None
    return {"folder": f"tokenizer-{files.sha256[:12]}", "sha256": files.sha256}


def keep_tokenizer(files: TokenizerFiles | None, run: Path) -> None:
    """Copy a tokenizer's files into a run folder, where they are not there; on one rank."""
    record = tokenizer_record(files)
    if files is None or record is None:
        return
    folder = run / record["folder"]
    folder.mkdir(exist_ok=True)
    for name, content in files.contents.items():
        target = folder / name
        if not target.is_file() or target.read_bytes() != content:
            unfinished = target.with_name(f".{name}.part")
            unfinished.write_bytes(content)
            unfinished.replace(target)


def run_tokenizer(checkpoint: Checkpoint, config: RunConfig, named: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint: that at `named`, in the run folder, or of the config.

    Raises ConfigError where there is none, and DataError for one that is damaged or replaced, or
    that has ids which the model lacks.
    """
    saved: Any = checkpoint.manifest.state.get("trainer", {})
    record: dict[str, str] | None = saved.get(RECORD)
    tokenizer = open_tokenizer(named or _own_path(checkpoint, config, record))
    files = tokenizer.files
    if named is None and record is not None and files.sha256 != record["sha256"]:
        raise DataError(
            f"tokenizer {files.path} (sha256 {files.sha256[:12]}...) is not the one of "
            f"{checkpoint.path} (sha256 {record['sha256'][:12]}...): it was replaced or damaged; "
            "copy it again, or give --tokenizer FILE"
        )
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"tokenizer {files.path} has {number_of(tokenizer.vocab_size, 'id')}, the model "
            f"{config.model.vocab_size}; give the one that the model was trained with"
        )
    return tokenizer


def _own_path(
    checkpoint: Checkpoint, config: RunConfig, record: dict[str, str] | None
) -> str | Path:
    """The path of a checkpoint's own tokenizer. Raises ConfigError where there is none."""
    if record is not None:
        in_run = checkpoint.path.resolve().parent.parent / record["folder"]
        if in_run.is_dir():
            return in_run
    if config.data.tokenizer is None:
        raise ConfigError(
            "the run was trained without data.tokenizer, so it can neither read nor write text; "
            "give --tokenizer FILE, or resume it with data.tokenizer=FILE, which its next "
            "checkpoint then names"
        )
    if not Path(config.data.tokenizer).exists():
        raise ConfigError(
            f"the run's tokenizer is neither in its folder nor at "
            f"data.tokenizer={config.data.tokenizer}; give --tokenizer FILE"
        )
    return config.data.tokenizer
