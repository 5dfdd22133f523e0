"""`megalite data inspect`: the contents of a dataset, and checks that it is sound."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalite.cli.data.source import unknown
from megalite.cli.formatting import print_json
from megalite.cli.options import AsJson, path
from megalite.wording import number_of

if TYPE_CHECKING:
    from megalite.data.inspection import Inspection

BAR_CHARS = 40


def inspect(
    prefix: Annotated[
        str,
        typer.Argument(metavar="PREFIX", parser=path, help="A dataset, PREFIX.bin and PREFIX.idx."),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            parser=path,
            help="Tokenizer to decode with, a file or a folder (default: its own).",
        ),
    ] = None,
    documents: Annotated[int, typer.Option(metavar="N", help="Documents to print.")] = 3,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each to print.")] = 64,
    rendered: Annotated[
        bool,
        typer.Option(
            "--rendered",
            help="Print special tokens, too, and what is trained on between white brackets.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a dataset's counts, lengths and documents; verify it.

    Exit code 2 if it is damaged or not what its sidecar says.
    """
    from megalite.data.inspection import inspect_dataset
    from megalite.errors import DataError

    found = inspect_dataset(prefix, tokenizer, documents, tokens, rendered)
    if as_json:
        print_json(_values(found))
    else:
        typer.echo("\n".join(report(found, rendered)))
    if bad := [check for check in found.checks if not check.good]:
        raise DataError("\n".join(f"{prefix}: {check.name}: {check.detail}" for check in bad))


def _values(found: Inspection) -> dict[str, Any]:
    """The values of a whole inspection, by the names of its fields; the sidecar as in its file."""
    sidecar = None if found.sidecar is None else found.sidecar.model_dump()
    more = {"mean_tokens": found.mean_tokens, "sound": found.good}
    return {**asdict(found), "sidecar": sidecar, **more}


def report(found: Inspection, rendered: bool = False) -> list[str]:
    """The lines of a whole inspection; `rendered`: documents as lines of their own."""
    quantiles = ", ".join(f"{share:.0%} {length:,}" for share, length in found.quantiles.items())
    lines = [
        f"dataset    {found.prefix}",
        f"tokens     {found.num_tokens:,} ({found.dtype})",
        f"documents  {found.num_documents:,} in {number_of(found.num_sequences, 'sequence', ',')}",
        *_trained(found),
        *_origin(found),
        f"lengths    mean {found.mean_tokens:,.1f} tokens; quantiles {quantiles or 'none'}",
        *_histogram(found),
    ]
    for shown in found.shown:
        count = number_of(shown.num_tokens, "token", ",")
        if rendered:
            lines += [f"document {shown.number} ({count}):", shown.text]
        else:
            lines.append(f"document {shown.number} ({count}): {shown.text!r}")
    for check in found.checks:
        lines.append(f"check {check.name}: {'good' if check.good else 'BAD'}: {check.detail}")
    return lines


def _trained(found: Inspection) -> list[str]:
    if found.trained_tokens is None:
        return []
    stated = found.sidecar.loss_mask if found.sidecar is not None else None
    share = max(found.trained_tokens, 0) / max(found.num_tokens, 1)
    by = f", marked by {stated.marked_by} of {stated.template}" if stated is not None else ""
    return [f"trained    {number_of(found.trained_tokens, 'token', ',')} ({share:.1%}){by}"]


def _origin(found: Inspection) -> list[str]:
    if found.sidecar is None:
        return ["source     not known (no .json beside it)"]
    source = found.sidecar.source
    lines = [
        f"source     {source.description} ({number_of(source.text_bytes, 'byte', ',')} of text)",
        f"tokenizer  {found.tokenizer or found.sidecar.tokenizer.file} "
        f"({number_of(found.sidecar.vocab_size, 'entry', ',')}, end id {found.sidecar.eos_id})",
    ]
    if source.unknown_ids is not None and source.unknown_bytes is not None:
        lines.append(unknown(source.unknown_ids, source.unknown_bytes, source.text_bytes))
    if source.skipped:
        counts = ", ".join(f"{fault}: {count:,}" for fault, count in source.skipped.items())
        lines.append(f"skipped    {counts}")
    return lines


def _histogram(found: Inspection) -> list[str]:
    most = max((count for _, _, count in found.histogram), default=1)
    return [
        f"  {first:>13,} - {last:<13,} {count:>13,} {'#' * -(-count * BAR_CHARS // most)}".rstrip()
        for first, last, count in found.histogram
    ]
