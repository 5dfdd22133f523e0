"""Configs that come with megalite are found by name, as a run, as a base and as hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.load import load_config
from megalite.config.shipped import find_config, near_names, shipped_configs
from megalite.errors import ConfigError
from megalite.run.hardware import named_hardware, presets
from tests import ROOT

CONFIGS = ROOT / "configs"


def test_every_file_has_a_name_a_kind_and_a_line() -> None:
    found = shipped_configs()
    assert {one.path for one in found.values()} == set(CONFIGS.rglob("*.toml"))
    assert list(found)[:2] == ["quickstart", "llama-8b-64gpu"]
    assert found["models/qwen2.5-0.5b"].path == CONFIGS / "models" / "qwen2.5-0.5b.toml"
    for name, one in found.items():
        assert one.name == name
        first = one.path.read_text(encoding="utf-8").splitlines()[0]
        assert first == f"# {one.summary}"
        assert one.summary.endswith(".")
    assert [one.kind for one in found.values()] == sorted(
        (one.kind for one in found.values()), key=["runs", "models", "hardware"].index
    )


def test_the_last_parts_of_names_differ() -> None:
    """So that a suggestion by the last part is of one config."""
    last = [name.rpartition("/")[2] for name in shipped_configs()]
    assert len(last) == len(set(last))


def test_a_file_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = CONFIGS / "quickstart.toml"
    assert find_config("quickstart", Path()) == shipped
    (tmp_path / "quickstart").mkdir()
    assert find_config("quickstart", Path()) == shipped  # a folder is no config
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").touch()
    assert find_config("quickstart", Path()) == Path("quickstart")
    assert find_config("quickstart", tmp_path / "elsewhere") == shipped


@pytest.mark.parametrize("name", ["quickstart", "llama-8b-64gpu"])
def test_a_copy_elsewhere_means_the_same(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text(shipped_configs()[name].path.read_text(encoding="utf-8"))
    assert load_config(copy).config == load_config(name).config


def test_a_base_beside_the_file_wins_over_the_name(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('base = "models/llama-tiny"\n[data]\nseq_length = 8\n[train]\nsteps = 1\n'
                   "global_batch = 1\n")  # fmt: skip
    tiny = load_config("quickstart").config.model
    assert load_config(run).config.model == tiny
    own = tmp_path / "models" / "llama-tiny"
    own.parent.mkdir()
    own.write_text((CONFIGS / "models" / "llama-8b.toml").read_text(encoding="utf-8"))
    assert load_config(run).config.model != tiny
    assert load_config(run).origins["model.num_layers"] == f"base {own}"


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("qickstart", "quickstart"),
        ("configs/quickstart.toml", "quickstart"),
        ("llama-8b", "models/llama-8b"),
        ("model/qwen3_8b", "models/qwen3-8b"),
    ],
)
def test_a_wrong_name_is_answered_with_near_ones(
    wrong: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert near_names(wrong)[0] == near
    with pytest.raises(ConfigError) as caught:
        load_config(wrong)
    assert f"cannot read config {wrong}: No such file or directory; did you mean {near}" in str(
        caught.value
    )
    assert "`megalite configs` lists those that come with megalite" in str(caught.value)


def test_hardware_has_its_listed_name_and_a_short_one() -> None:
    names = [one.name for one in shipped_configs().values() if one.kind == "hardware"]
    assert [named_hardware(name) for name in names] == list(presets().values())
    assert named_hardware("hardware/H100") == named_hardware("h100")


def test_another_path_is_not_made_by_the_words_of_the_file(tmp_path: Path) -> None:
    """A typing error in data.path must not become a dataset."""
    words = ["builtin", "--vocab-size=512", "--max-bytes=8000000"]
    assert load_config("quickstart").config.data.prepare == words
    assert load_config("quickstart", ["data.path=data/mine"]).config.data.prepare == []
    both = ["data.path=data/mine", 'data.prepare=["my/texts"]']
    for overrides in (both, both[::-1]):
        assert load_config("quickstart", overrides).config.data.prepare == ["my/texts"]
    path = tmp_path / "own.toml"
    path.write_text('base = "quickstart"\n[data]\npath = "data/mine"\n')
    assert load_config(path).config.data.prepare == []
    path.write_text('base = "quickstart"\n[data]\nprepare = ["my/texts"]\n')
    assert load_config(path).config.data.prepare == ["my/texts"]
