"""`python -m megalite`, the same as the `megalite` command."""

from megalite.cli.main import main

main()
