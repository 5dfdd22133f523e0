"""`megalite plan`: stages, memory and least time of a run, and what would fit where it does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.cli.plan_report import GIB, make_report
from megalite.hardware import presets
from megalite.planner import beside_tensors

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LARGE = str(CONFIGS / "runs" / "llama-8b-64gpu.toml")
SMALL = str(CONFIGS / "quickstart.toml")
ON_H100 = ["--gpus", "64", "--hardware", "h100"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def lines(*arguments: str) -> list[str]:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return list(done.stdout.splitlines())


def refused(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 2
    return str(done.stderr)


def rows(found: list[str]) -> list[list[str]]:
    """Cells of the memory table."""
    first = next(i for i, line in enumerate(found) if "parameters  weights" in line)
    end = next(i for i, line in enumerate(found) if line.startswith("tensors of a rank"))
    return [line.split() for line in found[first + 1 : end]]


@pytest.fixture
def one_gpu(tmp_path: Path) -> str:
    """8B parameters without any parallelism."""
    path = tmp_path / "one.toml"
    path.write_text(
        f'base = "{CONFIGS / "models" / "llama-8b.toml"}"\n'
        '[data]\npath = "x"\ntokenizer = "x.model"\nseq_length = 4096\n'
        '[optimizer]\nlr = 1e-4\nlr_schedule = "constant"\n'
        '[train]\nsteps = 10\nglobal_batch = 64\nmicro_batch = 2\ndtype = "bfloat16"\n'
    )
    return str(path)


def test_stages_are_those_that_schedule_shows() -> None:
    shown = CliRunner().invoke(app, ["schedule", "--config", LARGE]).output.splitlines()
    found = lines(LARGE)
    start = found.index(shown[0])
    assert found[start : start + 9] == shown[:9]  # eight stages under their heading
    assert [line.split()[2] for line in found[start + 1 : start + 9]][-1] == "30-31"


def test_every_rank_has_a_row_and_parts_add_up() -> None:
    table = rows(lines(LARGE, *ON_H100))
    report = make_report(LARGE, [], 64)
    assert len(table) == 2
    for row, memory in zip(table, report.ranks, strict=True):
        *parts, total = (float(cell) for cell in row[2:])
        assert sum(parts) == pytest.approx(total, abs=0.03)
        assert total == pytest.approx(memory.total / GIB, abs=0.005)


def test_states_of_bfloat16_are_6_and_12_shared_bytes_a_parameter() -> None:
    for dp in (1, 4, 16):
        for memory in make_report(LARGE, [], 16 * dp).ranks:
            states = memory.states
            held = states.weights + states.gradients + states.optimizer
            assert held / states.num_parameters == pytest.approx(6 + 12 / dp, rel=1e-4)


def test_the_last_line_is_the_time_at_the_data_sheets_peak() -> None:
    report = make_report(LARGE, [], 64)
    seconds = report.step_flops / (64 * 989.4e12) / report.utilised
    found = lines(LARGE, *ON_H100)[-1]
    assert float(found.split("at least ")[1].split()[0]) == pytest.approx(seconds, rel=5e-3)
    assert 0.5 < report.utilised < 1.0


def test_an_unnamed_or_peakless_device_gets_no_time(tmp_path: Path) -> None:
    assert not any(line.startswith("time") for line in lines(LARGE))
    own = tmp_path / "own.toml"
    text = (CONFIGS / "hardware" / "h100.toml").read_text()
    own.write_text(re.sub(r"^bfloat16.*\n", "", text, flags=re.MULTILINE))
    assert lines(LARGE, "--gpus", "64", "--hardware", str(own))[-1].startswith("time         n/a")


def test_what_does_not_fit_says_by_how_much_and_what_would(one_gpu: str) -> None:
    done = run(one_gpu, "--hardware", "h100", "--gpus", "16")
    assert done.exit_code == 2
    over = re.search(r"does not fit: pipeline rank 0 takes ([\d.]+) GiB more", done.stdout)
    report, h100 = make_report(one_gpu, [], 16), presets()["h100"]
    assert over is not None
    assert float(over[1]) == pytest.approx(report.most_bytes / GIB - h100.memory_gib, abs=0.05)
    changes = re.findall(r"fits with (.*): ([\d.]+) GiB", done.stdout)
    assert len(changes) >= 3
    for change, needed in changes:
        other = run(one_gpu, *change.split(), "--gpus", "16", "--hardware", "h100")
        assert other.exit_code == 0, (change, other.output)
        assert f"memory       {needed} of 79.1 GiB" in other.stdout
    assert [float(n) for _, n in changes] == sorted((float(n) for _, n in changes), reverse=True)


def test_where_no_single_change_helps_it_says_so(one_gpu: str) -> None:
    done = run(one_gpu, "--hardware", "h100", "train.micro_batch=32", "data.seq_length=65536")
    assert done.exit_code == 2
    assert "no single change helps" in done.stdout


def test_less_is_held_the_more_is_recomputed() -> None:
    held = [
        make_report(LARGE, [f"train.recompute={kind}"], 64).ranks[0].activations
        for kind in ("none", "selective", "full")
    ]
    assert held[0] > held[1] > 3 * held[2]


def test_a_process_takes_more_than_its_tensors() -> None:
    report = make_report(LARGE, [], 64)
    tensors = report.ranks[report.fullest].total
    assert report.most_bytes == tensors + beside_tensors(tensors) > tensors + GIB


def test_mistakes_are_told_as_train_tells_them() -> None:
    assert "parallel.tp=3" in refused(SMALL, "parallel.tp=3")
    assert "world size 12" in refused(LARGE, "--gpus", "12")
    assert "use one of a100, b200, h100, h200" in refused(SMALL, "--hardware", "h1000")
    assert "none.toml" in refused(SMALL, "--hardware", "none.toml")


def test_the_page_shows_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (CONFIGS.parent / "docs" / "plan.md").read_text(encoding="utf-8")
    found = re.search(r"```bash\nmegalite plan (.*?)\n```\n\n```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    command, shown = found.groups()
    monkeypatch.chdir(CONFIGS.parent)
    assert "\n".join(lines(*command.split())) + "\n" == shown
