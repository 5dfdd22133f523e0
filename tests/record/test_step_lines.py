"""Console lines of a step: megalite's own, and Megatron-LM's as scripts read them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.record.metrics import Device
from megalite.record.step_lines import StepLines, step_line

CPU = Device("x86_64", False, None, None)
LINE: dict[str, Any] = {
    "step": 120,
    "loss": 4.18734,
    "grad_norm": 0.8211,
    "lr": 3e-4,
    "loss_scale": 1.0,
    "step_time_s": 0.4123,
    "tokens_per_s_per_gpu": 39_741.0,
    "model_tflops_per_gpu": 123.44,
    "mfu_causal": 0.4121,
    "memory_peak_bytes": int(38.1 * 2**30),
    "global_batch": 16,
    "consumed_samples": 1920,
    "time_data_s": 0.0016,
}

# What log-reading scripts of the Megatron world look for.
MEGATRON = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): (\d+\.\d) \| "
    r"throughput per GPU \(TFLOP/s/GPU\): (\d+\.\d) \| "
    r"learning rate: (\d\.\d{6}E[+-]\d\d) \| global batch size: +(\d+) \| "
    r"(?:lm loss: (\d\.\d{6}E[+-]\d\d|nan|NAN) \| )?loss scale: (\d+\.\d) \| "
    r"grad norm: (\d+\.\d{3}|nan) \| "
    r"number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|"
)


def lines(**log: Any) -> StepLines:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 8}
    config = RunConfig.model_validate(
        {
            "model": {**sizes, "vocab_size": 16},
            "data": {"seq_length": 4},
            "train": {"steps": 130, "global_batch": 16},
            "log": log,
        }
    )
    return StepLines(config, CPU, 130)


def test_the_line_of_a_step() -> None:
    gpu = Device("NVIDIA H200", True, 989.0, int(139.8 * 2**30))
    assert step_line(LINE, 2000, gpu) == (
        "step   120/2000  loss 4.1873  gnorm 0.82  lr 3.00e-04  412.3 ms  39.7k tok/s/gpu  "
        "mfu 41.2%  mem 38.1/139.8 GiB  data 0.4%"
    )
    slow = {**LINE, "mfu_causal": None, "tokens_per_s_per_gpu": 812.4, "loss": math.nan}
    assert step_line(slow, 2000, CPU) == (
        "step   120/2000  loss nan  gnorm 0.82  lr 3.00e-04  412.3 ms  812 tok/s/rank  "
        "mfu n/a  mem 38.1 GiB  data 0.4%"
    )


def test_lines_come_at_the_interval_and_at_the_end() -> None:
    every = lines(interval=50)
    said = [step for step in range(1, 131) if every.step({**LINE, "step": step}, False)]
    assert said == [50, 100, 130]


def test_megatrons_line_has_its_names_and_means_since_the_last_line() -> None:
    megatron = lines(interval=3, format="megatron")
    steps = [
        {**LINE, "step": 1, "loss": 4.0, "step_time_s": 0.1},
        {**LINE, "step": 2, "loss": math.nan, "step_time_s": 0.2},
        {**LINE, "step": 3, "loss": 2.0, "step_time_s": 0.3, "loss_scale": 65536.0},
    ]
    said = [megatron.step(s, skipped=math.isnan(s["loss"])) for s in steps]
    assert said[:2] == [None, None]
    found = MEGATRON.fullmatch(str(said[2]))
    assert found is not None, said[2]
    assert found.groups() == (
        *("3", "130", "1920", "200.0", "123.4", "3.000000E-04", "16", "3.000000E+00", "65536.0"),
        *("0.821", "1", "1"),
    )
    megatron.step({**LINE, "step": 4}, False)
    megatron.step({**LINE, "step": 5}, False)
    again = MEGATRON.fullmatch(str(megatron.step({**LINE, "step": 6, "loss": 1.0}, False)))
    assert again is not None
    assert again.groups()[-2:] == ("0", "0")  # counted since the last line


def test_megatrons_line_without_an_applied_update_has_no_loss() -> None:
    megatron = lines(format="megatron")
    line = str(megatron.step({**LINE, "loss": math.nan, "grad_norm": math.nan}, skipped=True))
    found = MEGATRON.fullmatch(line)
    assert found is not None, line
    assert found.groups()[7] is None
    assert found.groups()[9:] == ("nan", "1", "1")


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ({}, "step   120/130  validation loss 2.0000 over 64 tokens"),
        (
            {"format": "megatron"},
            " validation loss at iteration 120 | lm loss value: 2.000000E+00 | "
            "lm loss PPL: 7.389056E+00 | ",
        ),
    ],
)
def test_the_line_of_an_evaluation(log: dict[str, str], line: str) -> None:
    assert lines(**log).evaluation(120, "validation", 2.0, 64) == line
