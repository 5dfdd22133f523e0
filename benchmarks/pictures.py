"""Draws the pictures in docs/ again, each by the command that a page shows for it.

    python -m benchmarks.pictures [RUN]

RUN: the folder of a recorded run, in place of runs/quickstart; without it pictures of runs stay as
they are. A command with a picture stands alone in its line and ends with the picture's path.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from megalite.cli.main import app

ROOT = Path(__file__).parents[1]
RUN = "runs/quickstart"  # as the pages have it
_COMMAND = re.compile(r"^megalite (.+) (docs/\S+\.(?:svg|png))$", re.MULTILINE)


class Picture(NamedTuple):
    """A picture of a page: the words of its command up to its path, and the path from the root."""

    words: tuple[str, ...]
    path: Path

    @property
    def is_of_run(self) -> bool:
        """True if a recorded run is drawn."""
        return RUN in self.words

    def draw(self, root: Path, run: Path | None = None) -> None:
        """Draw it below `root`, from `run` where it is of a run."""
        out = root / self.path
        out.parent.mkdir(parents=True, exist_ok=True)
        words = [str(run) if word == RUN else word for word in self.words]
        app([*words, str(out)], standalone_mode=False)


def pictures() -> list[Picture]:
    """The pictures of all pages, in their order."""
    texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    return [
        Picture(tuple(words.split()), Path(path))
        for text in texts
        for words, path in _COMMAND.findall(text)
    ]


def main() -> None:
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for picture in pictures():
        if run is not None or not picture.is_of_run:
            picture.draw(ROOT, run)


if __name__ == "__main__":
    main()
