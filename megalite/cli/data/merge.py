"""`megalite data merge`: join datasets."""

from __future__ import annotations

from typing import Annotated

import typer

from megalite.cli.options import path


def merge(
    out: Annotated[
        str, typer.Argument(metavar="OUT", parser=path, help="PREFIX of the files to make.")
    ],
    prefixes: Annotated[
        list[str],
        typer.Argument(
            metavar="PREFIX...", parser=path, help="Datasets, in the order to join them."
        ),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a dataset of this name.")
    ] = False,
) -> None:
    """Join datasets of the same tokenizer: the files that one run over all the text would make."""
    from megalite.corpus.merge import merge as run

    made = run(out, prefixes, overwrite)
    typer.echo(
        f"wrote {out}.bin .idx: {made.num_tokens:,} tokens ({made.dtype.name}), "
        f"{made.num_documents:,} documents of {len(prefixes)} datasets"
    )
