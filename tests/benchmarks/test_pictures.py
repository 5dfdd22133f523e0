"""The pictures of the pages are those that the commands of the pages draw now."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pictures import Picture, pictures
from megalite.record.records import MetricsFile
from tests import ROOT


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    file = MetricsFile(folder / "metrics.jsonl")
    file.write("run", config={"model": {"vocab_size": 512}}, parameters=1000)
    for step in range(1, 31):
        file.write("step", step=step, loss=6.0 / step, consumed_tokens=step, lr=1e-3)
    file.write("eval", step=30, name="validation", loss=1.0)
    file.close()
    return folder


def size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


@pytest.mark.long
@pytest.mark.parametrize("picture", pictures(), ids=lambda picture: picture.path.name)
def test_a_picture_is_what_its_command_draws(picture: Picture, tmp_path: Path, run: Path) -> None:
    picture.draw(tmp_path, run)
    kept, drawn = (root / picture.path for root in (ROOT, tmp_path))
    if picture.path.suffix == ".svg":
        assert drawn.read_text() == kept.read_text()
    else:
        assert size(drawn.read_bytes()) == size(kept.read_bytes())  # pixels differ by version
        assert kept.stat().st_size < 200_000


def test_every_picture_has_a_command_and_a_place_on_a_page() -> None:
    drawn = [picture.path for picture in pictures()]
    kept = [path for form in ("svg", "png") for path in (ROOT / "docs").rglob(f"*.{form}")]
    assert sorted(drawn) == sorted(path.relative_to(ROOT) for path in kept)
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for path in drawn:
        assert f"]({path.relative_to('docs').as_posix()})" in pages
    assert [picture.path.name for picture in pictures() if picture.is_of_run] == ["loss.png"]
