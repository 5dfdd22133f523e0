"""`megalite plan`: stages, memory and least time of a run, and what would fit where it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.cli.plan_report import GIB, make_report
from megalite.planner import beside_tensors
from tests import ROOT

CONFIGS = ROOT / "configs"
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
        for memory in make_report(LARGE, [], 4 * dp).ranks:
            states = memory.states
            held = states.weights + states.gradients + states.optimizer
            assert held / states.num_parameters == pytest.approx(6 + 12 / dp, rel=1e-4)


def test_the_time_is_that_at_the_data_sheets_peak() -> None:
    report = make_report(LARGE, [], 64)
    seconds = report.step_flops / (64 * 989.4e12) / report.utilised
    time, rate = lines(LARGE, *ON_H100)[-2:]
    assert time.split("at least ")[1].startswith(f"{seconds:.3g} s a step")
    assert f"{100_000 * seconds / 86400:.1f} days for 100000 steps" in time
    tokens = int(time.split("at most ")[1].split()[0].replace(",", ""))
    assert tokens == pytest.approx(512 * 8192 / seconds / 64, rel=1e-3)
    assert rate.endswith(f"leave {report.utilised:.1%} to the model")


def test_a_growing_batch_makes_a_shorter_run() -> None:
    ramp = ["batch_ramp_start=1", "batch_ramp_increment=1", "batch_ramp_samples=200"]
    fixed = ["train.steps=40", "parallel.dp=1", "train.micro_batch=1"]
    growing = [*fixed, *(f"train.{text}" for text in ramp)]
    taken = []
    for options in (fixed, growing):
        found = re.search(
            r"([\d.]+) ms for 40 steps", lines(SMALL, *options, "--hardware", "h100")[-2]
        )
        assert found is not None
        taken.append(float(found[1]))
    share = make_report(SMALL, growing).run_samples / (40 * 8)
    assert share < 0.9
    assert taken[1] / taken[0] == pytest.approx(share, rel=0.02)


def test_recomputation_is_counted_alike_within_a_backward_and_before_it() -> None:
    """A whole stage again costs what its layers again do, and the head."""
    options = ["pipeline.schedule=1f1b", "parallel.vpp=1", "parallel.tp=8"]
    none, full, stage = (
        make_report(LARGE, [*options, f"train.recompute={kind}"], 64).utilised
        for kind in ("none", "full", "stage")
    )
    assert 0.70 < full / none < 0.80  # three forwards' worth of four
    assert 0.70 < stage / none < full / none


def test_an_unnamed_or_peakless_device_gets_no_time(tmp_path: Path) -> None:
    assert not any(line.startswith("time") for line in lines(LARGE))
    own = tmp_path / "own.toml"
    text = (CONFIGS / "hardware" / "h100.toml").read_text()
    own.write_text(re.sub(r"^bfloat16.*\n", "", text, flags=re.MULTILINE))
    assert lines(LARGE, "--gpus", "64", "--hardware", str(own))[-1].startswith("time         n/a")


def fitting(output: str) -> list[tuple[str, str]]:
    return re.findall(r"fits with (.*): ([\d.]+) GiB", output)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (
            ["--gpus", "16"],
            {"train.micro_batch", "train.recompute", "parallel.tp", "parallel.pp"},
        ),
        (["parallel.dp=16", "optimizer.zero=0"], {"parallel.tp", "parallel.dp"}),
        (
            ["--gpus", "8", "optimizer.zero=0", "train.recompute=full"],
            {"optimizer.zero", "parallel.tp", "parallel.pp"},
        ),
        (
            ["--gpus", "8", "parallel.tp=2", "train.micro_batch=8"],
            {"train.micro_batch", "train.recompute", "parallel.tp"},
        ),
        (
            ["--gpus", "4", "train.micro_batch=8"],  # one alone is not enough
            {"train.micro_batch", "train.recompute", "parallel.tp", "parallel.pp"},
        ),
    ],
)
def test_what_does_not_fit_says_by_how_much_and_what_would(
    one_gpu: str, options: list[str], keys: set[str]
) -> None:
    """Each line is followed: it fits, and takes what was said."""
    done = run(one_gpu, "--hardware", "h100", *options)
    assert done.exit_code == 2
    gpus = [option for option in options if option.isdigit()]
    settings = [option for option in options if "=" in option]
    report = make_report(one_gpu, settings, int(gpus[0]) if gpus else None)
    over = re.search(r"does not fit: pipeline rank 0 takes ([\d.]+) GiB more", done.stdout)
    assert over is not None
    assert float(over[1]) == pytest.approx(report.most_bytes / GIB - 79.1, abs=0.05)
    changes = fitting(done.stdout)
    assert keys == {text.partition("=")[0] for change, _ in changes for text in change.split()}
    for change, needed in changes:
        changed = {text.partition("=")[0] for text in change.split()}
        kept = [text for text in settings if text.partition("=")[0] not in changed]
        count = ["--gpus", *gpus] if gpus else []
        other = run(one_gpu, *kept, *change.split(), *count, "--hardware", "h100")
        assert other.exit_code == 0, (change, other.output)
        assert f"memory       {needed} of 79.1 GiB" in other.stdout
        assert f"= {report.layout.world_size} ranks" in other.stdout


@pytest.mark.parametrize(("tp", "changed"), [(2, 1), (1, 2)])
def test_two_changes_are_tried_where_one_is_not_enough(one_gpu: str, tp: int, changed: int) -> None:
    settings = [f"parallel.tp={tp}", "train.micro_batch=8"]
    done = run(one_gpu, "--hardware", "h100", "--gpus", "4", *settings)
    assert done.exit_code == 2
    assert {len(change.split()) for change, _ in fitting(done.stdout)} == {changed}


def test_where_nothing_helps_it_says_so(one_gpu: str) -> None:
    done = run(one_gpu, "--hardware", "h100", "optimizer.zero=0")
    assert done.exit_code == 2
    assert "take more ranks" in done.stdout


def test_put_off_weight_gradients_are_told_from_recomputation(one_gpu: str) -> None:
    """Recomputed layers are kept again by a schedule that puts weight gradients off."""
    options = ["parallel.pp=4", "train.recompute=full", "--gpus", "4", "--hardware", "h100"]
    assert run(one_gpu, *options).exit_code == 0  # 1f1b by default
    found = make_report(one_gpu, [*options[:2], "pipeline.schedule=zb-h1"], 4)
    assert (
        found.ranks[0].activations > 3 * make_report(one_gpu, options[:2], 4).ranks[0].activations
    )


def test_an_automatic_schedule_is_named(one_gpu: str) -> None:
    found = lines(one_gpu, "parallel.pp=4", "--gpus", "4", "pipeline.schedule=auto")
    schedule = next(line for line in found if line.startswith("schedule"))
    assert re.search(r"auto: \S+, bubble [\d.]+% \([\d.]+% if all stages took alike\)", schedule)


def test_a_tensor_parallel_group_wider_than_a_node_is_pointed_out(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    text = (CONFIGS / "hardware" / "h100.toml").read_text()
    own.write_text(text.replace("gpus_per_node = 8", "gpus_per_node = 4"))
    wide = [LARGE, "--gpus", "64", "parallel.tp=8"]
    assert "note: parallel.tp=8" in lines(*wide, "--hardware", str(own))[-1]
    found = lines(*wide, f"log.hardware={own}")
    assert "note: parallel.tp=8" in found[-1]  # the run's own file, where none is named


def test_less_is_held_the_more_is_recomputed() -> None:
    held = [
        make_report(LARGE, [f"train.recompute={kind}"], 64).ranks[0].activations
        for kind in ("none", "selective", "full")
    ]
    assert held[0] > held[1] > 3 * held[2]


def test_json_has_the_same_values(one_gpu: str) -> None:
    report = make_report(LARGE, [], 64)
    values = json.loads("\n".join(lines(LARGE, *ON_H100, "--json")))
    assert values["layout"] == {"tp": 2, "pp": 2, "dp": 16, "vpp": 4, "ranks": 64, "zero": 1}
    totals = [rank["total_bytes"] for rank in values["pipeline_ranks"]]
    assert totals == [memory.total for memory in report.ranks]
    for rank in values["pipeline_ranks"]:
        parts = [n for name, n in rank.items() if name not in ("parameters", "total_bytes")]
        assert sum(parts) == rank["total_bytes"]
    assert [layer for stage in values["stages"] for layer in stage["layers"]] == list(range(32))
    assert values["fits"]
    assert values["changes"] == []
    assert values["least_run_s"] == pytest.approx(100_000 * values["least_step_s"])
    done = run(one_gpu, "--gpus", "16", "--hardware", "h100", "--json")
    assert done.exit_code == 2
    assert not json.loads(done.stdout)["fits"]
    assert ["train.micro_batch=1"] in [c["settings"] for c in json.loads(done.stdout)["changes"]]
    assert json.loads(run(LARGE, "--json").stdout)["fits"] is None


def test_a_stage_that_is_recomputed_waits_with_its_input() -> None:
    found = lines(SMALL, "train.recompute=stage")
    waiting = next(line for line in found if line.startswith("tensors of a rank"))
    boundary = 2 * 128 // 2 * 160 * 4 / 2**20  # two sequences, cut over tp, in float32
    assert f"holds {boundary:.1f} MiB, 1.2 MiB once recomputed," in waiting


def test_a_process_takes_more_than_its_tensors() -> None:
    report = make_report(LARGE, [], 64)
    tensors = report.ranks[report.fullest].total
    assert report.most_bytes == tensors + beside_tensors(tensors) > tensors + GIB


def test_mistakes_are_told_as_train_tells_them() -> None:
    assert "parallel.tp=3" in refused(SMALL, "parallel.tp=3")
    assert "world size 6" in refused(LARGE, "--gpus", "6")
    assert "use one of a100, b200, h100, h200" in refused(SMALL, "--hardware", "h1000")
    assert "none.toml" in refused(SMALL, "--hardware", "none.toml")


def test_the_page_shows_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (CONFIGS.parent / "docs" / "plan.md").read_text(encoding="utf-8")
    found = re.search(r"```bash\nmegalite plan (.*?)\n```\n\n```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    command, shown = found.groups()
    monkeypatch.chdir(CONFIGS.parent)
    assert "\n".join(lines(*command.split())) + "\n" == shown
