"""The `megalite` command, and `python -m megalite`, which is the same."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point; Ctrl-C ends it without a traceback also before a verb runs."""
    try:
        from megalite.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)  # errors.EXIT_INTERRUPTED; an import may be interrupted again


if __name__ == "__main__":
    main()
