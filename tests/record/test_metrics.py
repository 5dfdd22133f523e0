"""metrics.jsonl: every line and key that other tools count on, and its repair after a crash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import megalite
from megalite.config import RunConfig
from megalite.record.records import TIME_PARTS, MetricsFile, read_metrics
from megalite.run.model_math import parameter_counts, training_flops
from megalite.train.loop import Trainer
from tests import ROOT
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    SEQ_LENGTH,
    VOCAB,
    lines,
    make_config,
    make_trainer,
    train,
    world_size,
    write_tokens,
)

STEP_KEYS = {
    "step": int,
    "loss": float,
    "grad_norm": float,
    "lr": float,
    "loss_scale": float,
    "step_time_s": float,
    "tokens": int,
    "tokens_per_s_per_gpu": float,
    "model_tflops_per_gpu": float,
    "mfu": type(None),  # the CPU has no known peak
    "mfu_causal": type(None),
    "memory_peak_bytes": int,
    "consumed_tokens": int,
    **{f"time_{part}_s": float for part in TIME_PARTS},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> RunConfig:
    """A run of three steps at tp 2 x pp 2 x dp 2, stopped after the second and resumed."""
    folder = tmp_path_factory.mktemp("metrics")
    write_tokens(folder / "data", 3 * GLOBAL_BATCH)
    config = make_config(folder, "run", "3d", train__steps=3, checkpoint__interval=2)
    pool.run(train, 8, [(config, 2), (config, None)])
    return config


@pytest.fixture(scope="module")
def run(config: RunConfig) -> Path:
    return Path(config.out) / config.name


@pytest.mark.long
def test_the_order_of_lines_and_the_attempt_that_wrote_them(run: Path) -> None:
    found = [(line["kind"], line["attempt"]) for line in read_metrics(run / "metrics.jsonl")]
    assert found == [
        ("run", 1),
        ("step", 1),
        ("step", 1),
        ("checkpoint", 1),
        ("end", 1),
        ("restart", 2),
        ("step", 2),
        ("checkpoint", 2),
        ("end", 2),
    ]
    assert [(e["step"], e["exit_code"], e["reason"]) for e in lines(run, "end")] == [
        (2, 75, "stopped"),
        (3, 0, "finished"),
    ]
    assert [c["path"][-13:] for c in lines(run, "checkpoint")] == ["step-00000002", "step-00000003"]


def test_the_first_line_says_what_ran_where(run: Path, config: RunConfig) -> None:
    (line,) = lines(run, "run")
    assert line == json.loads((run / "metrics.jsonl").read_text().split("\n")[0])
    assert line["config"]["model"]["vocab_size"] == VOCAB
    assert line["config"]["parallel"]["dp"] == 2
    assert RunConfig.model_validate(line["config"], strict=False) == config
    assert line["versions"] == {
        "megalite": megalite.__version__,
        "torch": torch.__version__,
        "python": line["versions"]["python"],
    }
    assert line["hardware"] == {
        "name": line["hardware"]["name"],
        "is_gpu": False,
        "peak_tflops": None,
        "memory_bytes": None,
    }
    assert line["world_size"] == 8
    assert line["parameters"] == parameter_counts(config.model).total()
    assert line["git_commit"] is None or len(line["git_commit"]) == 40
    (restart,) = lines(run, "restart")
    assert (restart["step"], restart["config"]) == (2, line["config"])


def test_step_lines_have_every_key(run: Path, config: RunConfig) -> None:
    tokens = GLOBAL_BATCH * SEQ_LENGTH
    per_token = training_flops(config.model, SEQ_LENGTH).total_full
    for number, line in enumerate(lines(run, "step"), start=1):
        assert {key: type(line[key]) for key in STEP_KEYS} == STEP_KEYS
        assert (line["step"], line["tokens"]) == (number, tokens)
        assert line["consumed_tokens"] == number * tokens
        assert 0 < line["grad_norm"] < 100
        assert line["memory_peak_bytes"] > 2**20
        speed = tokens / line["step_time_s"] / 8
        assert line["tokens_per_s_per_gpu"] == pytest.approx(speed)
        assert line["model_tflops_per_gpu"] == pytest.approx(speed * per_token / 1e12)


def test_every_name_is_documented(run: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for line in read_metrics(run / "metrics.jsonl"):
        unknown = [name for name in line if f"`{name}`" not in text]
        assert not unknown, f"docs/metrics.md does not name {unknown} of a {line['kind']} line"


def test_time_parts_add_up_to_the_step(run: Path) -> None:
    for line in lines(run, "step"):
        parts = {part: line[f"time_{part}_s"] for part in TIME_PARTS}
        assert sum(parts.values()) == pytest.approx(line["step_time_s"], rel=1e-9)
        assert all(seconds > 0 for seconds in parts.values()), parts


@pytest.mark.parametrize(
    ("layout", "without"),
    [
        ("serial", {"tp_comm", "pp_wait", "dp_comm"}),
        ("tp2", {"pp_wait", "dp_comm"}),
        ("pp2", {"tp_comm", "dp_comm"}),
        ("zero1", {"tp_comm", "pp_wait"}),
    ],
)
def test_a_part_that_a_layout_lacks_takes_no_time(
    pool: RankPool, config: RunConfig, layout: str, without: set[str]
) -> None:
    small = make_config(Path(config.out), f"parts-{layout}", layout, train__steps=2)
    pool.run(train, world_size(small), [(small, None)])
    for line in lines(Path(small.out) / small.name, "step"):
        parts = {part: line[f"time_{part}_s"] for part in TIME_PARTS}
        assert {part for part, seconds in parts.items() if seconds == 0} == without
        assert sum(parts.values()) == pytest.approx(line["step_time_s"], rel=1e-9)


def measured_where_a_line_is(ctx: Any, config: RunConfig) -> bool:
    """Runs in a rank: the steps that a GPU would measure are measured, here on CPU."""
    on_gpu = SimpleNamespace(device=torch.device("cuda"))

    def is_measured(trainer: Trainer, step: int) -> bool:
        assert rule(trainer, step)  # on CPU all are
        seen: bool = rule(SimpleNamespace(mesh=on_gpu, config=config, at=trainer.at), step)
        return seen

    rule: Any = Trainer._is_measured
    with mock.patch.object(Trainer, "_is_measured", is_measured):
        return make_trainer(ctx, config).run() == 0


def test_on_gpus_the_steps_with_a_console_line_are_measured(
    pool: RankPool, config: RunConfig
) -> None:
    folder = Path(config.out)
    changes = {"train__steps": 5, "log__interval": 2, "checkpoint__interval": 3}
    sampled = make_config(folder, "sampled", "zero1", **changes)
    assert all(pool.run(measured_where_a_line_is, world_size(sampled), sampled))
    for line in lines(folder / "sampled", "step"):
        parts = [line[name] for name in line if name.startswith("time_")]
        if line["step"] in (2, 4, 5):
            assert len(parts) == len(TIME_PARTS)
            assert sum(parts) == pytest.approx(line["step_time_s"], rel=1e-9)
        else:
            assert parts == []
            assert line["step_time_s"] > 0


def test_the_logged_norm_is_from_before_clipping(pool: RankPool, config: RunConfig) -> None:
    folder = Path(config.out)
    clips = {"tight": 1e-3, "none": None}
    jobs = [
        (make_config(folder, name, train__steps=2, optimizer__clip_grad=clip), None)
        for name, clip in clips.items()
    ]
    pool.run(train, 1, jobs)
    tight, none = ([s["grad_norm"] for s in lines(folder / name, "step")] for name in clips)
    assert tight[0] == none[0]
    assert min(tight) > 100 * 1e-3


def test_optimizer_memory_is_printed_and_is_a_share_of_it_under_zero1(
    pool: RankPool, config: RunConfig
) -> None:
    folder = Path(config.out)
    small = make_config(folder, "memory", "zero1", train__steps=2)
    pool.run(train, 2, [(small, None)])
    (memory,) = (line["memory"] for line in lines(folder / "memory", "run"))
    stored = memory["num_parameters"] + memory["num_padding"]
    assert memory["num_parameters"] == parameter_counts(small.model, padded=True).total()
    assert memory["param_bytes"] == memory["grad_bytes"] == 4 * stored
    assert memory["master_bytes"] == 0  # float32 weights are their own masters
    assert memory["exp_avg_bytes"] == memory["exp_avg_sq_bytes"] == 4 * stored // 2
    optimizer_mib = 2 * memory["exp_avg_bytes"] / 2**20
    log = (folder / "memory" / "log.txt").read_text()
    assert f", optimizer {optimizer_mib:.2f} MiB (of all " in log


def test_a_torn_last_line_is_removed_and_a_merely_unended_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write("run", step=0)
    first.write("step", step=1, loss=2.0)
    first.close()
    whole = path.read_bytes()
    for torn in (
        b'{"kind": "step", "attempt": 1, "hardware": {"a": 1}',
        b"{",
        b"\x00\x00",
        b"\xff",
    ):
        path.write_bytes(whole + torn)
        assert [line["kind"] for line in read_metrics(path)] == ["run", "step"]
        again = MetricsFile(path)
        assert again.attempt == 2
        again.write("restart", step=1)
        again.close()
        content = path.read_bytes()
        assert content.startswith(whole)
        assert [json.loads(line)["kind"] for line in content.splitlines()] == [
            "run",
            "step",
            "restart",
        ]
    path.write_bytes(whole[:-1])
    MetricsFile(path).close()
    assert path.read_bytes() == whole


def test_numbers_that_json_lacks_become_strings(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    values = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": 0.1 + 0.2, "e": None}
    file.write("step", **values)
    file.close()
    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert (line["a"], line["b"]) == ("nan", ["inf", {"c": "-inf"}])
    assert (line["d"], line["e"]) == (0.30000000000000004, None)
    assert math.isnan(float(line["a"]))
