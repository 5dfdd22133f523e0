"""The expected time of a layer: its counts are those of the model, its table that of the page."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.expected_layer import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    PRODUCTS,
    layer_bytes,
    layer_time,
)
from megalite.config.load import load_config
from megalite.run.hardware import named_hardware
from megalite.run.model_math import forward_flops, training_flops
from tests import ROOT

MODEL = load_config("llama-8b-64gpu").config.model
H100 = named_hardware("h100")
TOKENS = 8192


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_products_of_all_layers_and_ranks_are_those_of_the_model(tp: int) -> None:
    time = layer_time(MODEL, TOKENS, tp, H100)
    peak = H100.peak_tflops["bfloat16"] * 1e9  # FLOPs in a millisecond
    done = time.products * PRODUCTS * peak
    # a backward of attention has five products for two, where the model's FLOPs count four
    scores = time.attention_forward * ATTENTION_FORWARD * peak
    assert time.attention_backward * ATTENTION_BACKWARD * peak == pytest.approx(2.5 * scores)
    counted = training_flops(MODEL, TOKENS)
    head = 3 * forward_flops(MODEL, TOKENS).head
    expected = (counted.total_causal - head) * TOKENS
    assert MODEL.num_layers * tp * (done + 3 * scores) == pytest.approx(expected, rel=1e-9)


def test_a_wider_group_divides_all_but_the_collectives() -> None:
    one, two, eight = (layer_time(MODEL, TOKENS, tp, H100) for tp in (1, 2, 8))
    assert one.products == pytest.approx(8 * eight.products)
    assert layer_bytes(MODEL, TOKENS, 1) == pytest.approx(8 * layer_bytes(MODEL, TOKENS, 8))
    assert 0.0 == one.exposed < two.exposed < eight.exposed
    assert one.total < 2 * two.total < 8 * eight.total
    parts = replace(two, exposed=0.0)
    assert two.total - parts.total == pytest.approx(two.exposed)


def test_the_page_has_the_table_that_the_command_prints() -> None:
    command = [sys.executable, "-m", "benchmarks.expected_layer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
