"""`python -m tests.repository.kit.foreign_words`: write the tables of docs/from/ anew.

Each page names the frameworks whose words it has in the comment before its table. The words are
those of config/frameworks.toml, which messages are made from.
"""

from __future__ import annotations

import re
from pathlib import Path

from megalite.config.frameworks import ForeignWord, foreign_words
from tests import ROOT

PAGES = sorted((ROOT / "docs" / "from").glob("*.md"))

_TABLE = re.compile(r"(<!-- words of (?P<name>[\w -]+) -->\n\n).*?(?=\n\n|\Z)", re.DOTALL)


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page), encoding="utf-8")


def with_tables(page: Path) -> str:
    """The page's text with its tables as they should be."""
    text = page.read_text(encoding="utf-8").rstrip("\n")
    made = _TABLE.sub(lambda found: found[1] + table(found["name"]), text)
    return f"{made}\n"


def table(framework: str) -> str:
    words = [word for word in foreign_words() if word.framework == framework]
    assert words, f"frameworks.toml has no {framework}"
    rows = "\n".join(f"| `{flag(word)}` | {meaning(word)} |" for word in words)
    return f"| {framework} | megalite |\n|---|---|\n{rows}"


def flag(word: ForeignWord) -> str:
    """The word as its own framework's users type it."""
    is_flag = word.framework == "Megatron-LM"
    return f"--{word.word.replace('_', '-')}" if is_flag else word.word


def meaning(word: ForeignWord) -> str:
    if word.setting is None:
        # A switch needs no word: who reads "no ..." knows that false is that.
        values = [value for value in word.off if type(value) is not bool]
        off = " or ".join(str(value).lower() or '""' for value in values)
        return f"no {word.note}" + (f" (remove it if {off})" if off else "")
    return f"`{word.setting}`" + (f": {word.note}" if word.note else "")


if __name__ == "__main__":
    main()
