"""`megalite eval`: one result at every layout, bytes of the text, of runs and of new sets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from megalite.cli.main import app
from megalite.data.dataset import TokenDataset
from megalite.data.tokenizer import open_tokenizer
from tests.corpus.kit import prepare
from tests.pool import RankPool
from tests.train.kit.runs import lines, make_config, train, world_size

TEXT = "def f(x):\n\treturn x + 1  # \u4e2d\u2026\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """A run at tp 2 x pp 2 x dp 2 that evaluated at its end, and a second dataset."""
    path = tmp_path_factory.mktemp("score")
    for name, times in (("data", 60), ("more", 11)):
        (path / f"{name}.txt").write_text(TEXT * times)
    prepare(str(path / "data.txt"), str(path / "data"), vocab_size=290)
    prepare(str(path / "more.txt"), str(path / "more"), tokenizer=str(path / "data.model"))
    config = run_config(path)
    pool.run(train, world_size(config), [(config, None)])
    return path


def run_config(path: Path, name: str = "run", layout: str = "3d", **changes: Any) -> Any:
    options: dict[str, Any] = {
        "model__vocab_size": 300,
        "data__tokenizer": str(path / "data.model"),
        "data__split": (0.7, 0.2, 0.1),
        "train__steps": 2,
        "eval__interval": 2,
    }
    return make_config(path, name, layout, **options | changes)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments), "--device", "cpu"])


def values(text: str) -> dict[str, Any]:
    return json.loads(text)


def test_the_sets_of_a_run_have_the_losses_that_it_wrote(folder: Path) -> None:
    result = invoke(folder / "run", "--json")
    assert result.exit_code == 0, result.output
    found = values(result.stdout)
    written = {line["name"]: line for line in lines(folder / "run", "eval")}
    assert list(found) == ["validation", "test", "all"]
    for name, line in written.items():
        assert found[name]["loss"] == pytest.approx(line["loss"], rel=1e-6)
        assert found[name]["tokens"] == line["tokens"]
        assert found[name]["perplexity"] == pytest.approx(math.exp(line["loss"]), rel=1e-5)
    whole = sum(line["loss"] * line["tokens"] for line in written.values())
    assert found["all"]["loss"] == pytest.approx(whole / found["all"]["tokens"], rel=1e-6)


@pytest.mark.parametrize(
    "layout", [["--tp", "2", "--pp", "2"], ["--dp", "2", "--micro-batch", "2"]]
)
def test_every_layout_has_the_result_of_one_process(folder: Path, layout: list[str]) -> None:
    sets = ["--data", str(folder / "more"), "--data", f"again={folder / 'data'}"]
    command = [sys.executable, "-m", "megalite", "eval", str(folder / "run"), *sets, *layout]
    done = subprocess.run(
        [*command, "--json", "--device", "cpu"], capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    one, split = (
        values(invoke(folder / "run", *sets, "--json").stdout),
        values(done.stdout.decode()),
    )
    assert list(one) == list(split) == ["more", "again", "all"]
    for name in one:
        assert (one[name]["tokens"], one[name]["bytes"]) == (
            split[name]["tokens"], split[name]["bytes"]
        )  # fmt: skip
        assert split[name]["loss"] == pytest.approx(one[name]["loss"], rel=1e-6)


def test_bits_per_byte_are_those_of_the_decoded_text(folder: Path) -> None:
    """The tokens that count are labels: all but the first of each sample's stretch of the set."""
    result = invoke(folder / "run", "--data", folder / "more")
    assert result.exit_code == 0, result.output
    found = values(invoke(folder / "run", "--data", folder / "more", "--json").stdout)["more"]
    dataset, tokenizer = TokenDataset(folder / "more"), open_tokenizer(folder / "data.model")
    ids = np.asarray(dataset.span().read(0, found["tokens"] + 1))
    text = tokenizer.decode(ids).encode()[len(tokenizer.decode(ids[:1]).encode()) :]
    assert found["bytes"] == pytest.approx(len(text), abs=2)  # the last character may be unfinished
    bits = found["loss"] * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / found["bytes"])
    header, row = result.stdout.splitlines()
    assert header.split() == ["set", "loss", "perplexity", "bits/byte", "tokens", "bytes"]
    assert row.split()[0] == "more"
    assert row.split()[-2:] == [str(found["tokens"]), str(found["bytes"])]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--data", "gone"], "--data=gone: no file gone.bin or gone.idx"),
        (["--tp", "0"], "--tp=0 needs to be at least 1"),
        (["--tp", "3"], "parallel.tp=3"),
        (["--ema"], "holds no average of the weights"),
        (["--step", "9"], "step-00000009 does not exist"),
    ],
)
def test_odd_options_are_refused_by_name(folder: Path, options: list[str], line: str) -> None:
    result = invoke(folder / "run", *options)
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert all(text.startswith("error: ") for text in result.stderr.splitlines())


def test_two_sets_of_one_name_are_refused(folder: Path) -> None:
    data = ["--data", str(folder / "more")]
    result = invoke(folder / "run", *data, *data)
    assert result.exit_code == 2
    assert "two sets are called more; give NAME=PREFIX" in result.stderr


def evaluated(folder: Path, name: str) -> list[tuple[int, str]]:
    return [(line["step"], line["name"]) for line in lines(folder / name, "eval")]


def test_a_run_may_be_evaluated_before_its_first_step(folder: Path, pool: RankPool) -> None:
    config = run_config(folder, "early", "serial", eval__at_start=True)
    jobs = [(config, 1), (config, None)]
    pool.run(train, 1, jobs)
    assert evaluated(folder, "early") == [
        (0, "validation"), (2, "validation"), (2, "test"),
    ]  # fmt: skip
    start = lines(folder / "early", "eval")[0]["loss"]
    assert 5.4 < start < 6.0  # ln(300) = 5.7: untrained


def test_a_run_of_no_steps_is_evaluated(folder: Path, pool: RankPool) -> None:
    weights = {"checkpoint__load_weights": str(folder / "run"), "train__steps": 0}
    config = run_config(folder, "none", "serial", **weights)
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.code == 0, outcome.error
    assert evaluated(folder, "none") == [(0, "validation"), (0, "test")]
    trained = [line["loss"] for line in lines(folder / "run", "eval")]
    found = [line["loss"] for line in lines(folder / "none", "eval")]
    assert found == pytest.approx(trained, rel=1e-6)


def test_sets_that_are_new_to_a_finished_run_are_evaluated_once(
    folder: Path, pool: RankPool
) -> None:
    config = run_config(folder, "finished", "serial")
    more = {"eval__sets": [{"name": "more", "path": str(folder / "more")}]}
    grown = run_config(folder, "finished", "serial", **more)
    pool.run(train, 1, [(config, None), (grown, None), (grown, None)])
    assert evaluated(folder, "finished") == [(2, "validation"), (2, "test"), (2, "more")]
