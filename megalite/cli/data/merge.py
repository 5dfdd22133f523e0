"""`megalite data merge`: join datasets."""

from __future__ import annotations

from typing import Annotated

import typer

from megalite.cli.data.source import Out, Overwrite
from megalite.cli.options import path
from megalite.wording import number_of


def merge(
    prefixes: Annotated[
        list[str],
        typer.Argument(metavar="PREFIX", parser=path, help="Datasets, in the order to join them."),
    ],
    out: Out,
    overwrite: Overwrite = False,
) -> None:
    """Join datasets of the same tokenizer.

    Makes the files that preparing all of their text at once would make.
    """
    from megalite.corpus.merge import merge as run

    made = run(out, prefixes, overwrite)
    typer.echo(
        f"wrote {out}.bin .idx: {number_of(made.num_tokens, 'token', ',')} ({made.dtype.name}), "
        f"{number_of(made.num_documents, 'document', ',')} of {number_of(len(prefixes), 'dataset')}"
    )
