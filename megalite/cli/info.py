"""`megalite info`: a run, a checkpoint or a dataset in a page. Thin: values in, lines out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from megalite.cli.formatting import print_json, short_count
from megalite.cli.options import AsJson, near_runs, path
from megalite.errors import DataError
from megalite.wording import number_of

_MIB = 2**20


def info(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|PREFIX",
            parser=path,
            help="A run folder, a checkpoint, or a dataset by the PREFIX of its files.",
        ),
    ],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Verify checkpoint files by their sizes, not their hashes."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Describe and verify a run, a checkpoint or a dataset."""
    with near_runs(Path(name)):
        if not _exists(name):
            raise DataError(
                f"{name} does not exist: give a run folder, a checkpoint or the PREFIX of a dataset"
            )
        from megalite.train.info import describe

        found = describe(Path(name), verify=not quick)
    if as_json:
        return print_json(found)
    lines = {"run": _run, "checkpoint": _checkpoint, "dataset": _dataset}[found["kind"]]
    for line in lines(found, quick):
        typer.echo(line)


def _exists(name: str) -> bool:
    """True if a file, a folder or a dataset of this name exists. Needs no torch."""
    stem = name.removesuffix(".bin").removesuffix(".idx")
    return any(Path(file).exists() for file in (name, f"{stem}.bin", f"{stem}.idx"))


def _run(found: dict[str, Any], quick: bool) -> Iterator[str]:
    yield f"run          {found['path']}"
    yield from _model(found)
    step, total = found["step"], found["total_steps"]
    attempts = f", attempt {found['attempts']}" if found["attempts"] > 1 else ""
    yield (
        f"steps        {_text(step)} of {_text(total)}, "
        f"{short_count(found['consumed_tokens'])} tokens{attempts}, "
        f"{found['end'] or 'running or cut off'}"
    )
    yield f"loss         {_number(found['loss'])}"
    for name, loss in found["evaluations"].items():
        yield f"  {name:<10} {_number(loss)}"
    if found["skipped_steps"]:
        yield f"skipped      {number_of(found['skipped_steps'], 'step')} without an update"
    yield from _software(found)
    for number, checkpoint in enumerate(found["checkpoints"]):
        yield f"{'checkpoints' if number == 0 else '':<13}{_checkpoint_line(checkpoint, quick)}"
    if not found["checkpoints"]:
        yield "checkpoints  none"
    if found["damage"]:
        yield f"warning      {found['damage']}"


def _checkpoint_line(checkpoint: dict[str, Any], quick: bool) -> str:
    if not checkpoint["sound"]:
        return f"{checkpoint['name']}  BAD: {checkpoint['problem']}"
    return f"{checkpoint['name']}  {checkpoint['bytes'] / _MIB:,.1f} MiB  {_verified(quick)}"


def _checkpoint(found: dict[str, Any], quick: bool) -> Iterator[str]:
    yield f"checkpoint   {found['path']}"
    yield f"step         {found['step']}, {short_count(found['consumed_tokens'])} tokens"
    yield from _model(found)
    yield (
        f"weights      {short_count(found['stored_weights'])} stored as "
        f"{', '.join(found['weight_dtypes'])}; states {', '.join(found['states'])}"
    )
    if found["weights_from"]:
        began = found["weights_from"]
        yield f"began from   {began['path']} ({began['checkpoint']})"
    if found["saved_at"]:
        at = " x ".join(f"{axis} {size}" for axis, size in found["saved_at"].items())
        yield f"saved at     {at}"
    yield (
        f"files        {found['files']}, {found['bytes'] / _MIB:,.1f} MiB in "
        f"{number_of(found['tensors'], 'tensor')}, {_verified(quick)}"
    )
    yield from _software(found)


def _dataset(found: dict[str, Any], quick: bool) -> Iterator[str]:
    yield f"dataset      {found['path']}"
    yield f"tokens       {found['tokens']:,} ({found['dtype']}, {found['bytes'] / _MIB:,.1f} MiB)"
    yield f"documents    {found['documents']:,} in {number_of(found['sequences'], 'sequence', ',')}"
    yield f"vocabulary   {_text(found['vocab_size'])}, tokenizer {_text(found['tokenizer'])}"
    yield f"source       {_text(found['source'])}"
    yield f"checks       {'good' if found['sound'] else 'BAD'}"
    for problem in found["problems"]:
        yield f"             {problem}"


def _model(found: dict[str, Any]) -> Iterator[str]:
    model, layout, optimizer = found["model"], found["layout"], found["optimizer"]
    parameters = ""
    if found.get("parameters"):
        parameters = f", {short_count(found['parameters'])} parameters"
    yield (
        f"model        {_text(model['family'])}, {_counted(model['num_layers'], 'layer')} of "
        f"{_text(model['hidden_size'])}, {_counted(model['num_heads'], 'head')}, vocabulary "
        f"{_text(model['vocab_size'])}{parameters}"
    )
    yield (
        "layout       "
        + " x ".join(f"{axis} {_text(size)}" for axis, size in layout.items())
        + f", {_text(found['dtype'])}, {_text(found['global_batch'])} x "
        f"{_counted(found['seq_length'], 'token')} a step"
    )
    yield f"schedule     {_text(found['schedule'])}"
    zero = "" if optimizer["zero"] is None else f", ZeRO-{optimizer['zero']}"
    yield f"optimizer    {_text(optimizer['name'])}{zero}"


def _software(found: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in (found["versions"] or {}).items())
    commit, hardware = found.get("git_commit"), found.get("hardware") or {}
    yield f"software     {versions or 'n/a'}{f', commit {commit[:12]}' if commit else ''}"
    yield f"kernels      {_kernels(found.get('kernels'))}"
    if hardware:
        peak = hardware.get("peak_tflops")
        shown = f"{peak:g} TFLOP/s" if peak else "n/a"
        yield f"hardware     {hardware.get('name', 'n/a')}, peak {shown}"


def _kernels(record: Any) -> str:
    """A run's kernels and the start of their table's hash, from a record of any age or damage."""
    if not isinstance(record, dict):
        return "n/a"
    table = record.get("table")
    return f"{_text(record.get('name'))}{f', table {table[:12]}' if table else ''}"


def _verified(quick: bool) -> str:
    return "sizes match" if quick else "verified"


def _text(value: Any) -> str:
    return "n/a" if value is None else str(value)


def _counted(value: Any, noun: str) -> str:
    return number_of(value, noun) if isinstance(value, int) else f"{_text(value)} {noun}s"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else _text(value)
