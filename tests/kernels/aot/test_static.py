"""Kernels compile for Hopper without spills, on tensor cores, with 128-bit accesses.

Compilation happens in a process of its own, in which no interpreter was ever active and no driver
is needed. The committed table holds what was reviewed, for each Triton version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import ROOT

TABLE = ROOT / "benchmarks" / "results" / "static_sm90.jsonl"
CAPABILITIES = (90, 80, 100)
SHARED_LIMIT = 227 * 1024
REGISTERS = 65536
GROWTH = 1.10
NARROW = 10  # scalars and row statistics; a tensor read 16 bits at a time takes dozens
# eight copies of a token: a row each, and a router weight and its gradient
NARROW_BY_KERNEL = {"unpermute_kernel": 16, "unpermute_grad_kernel": 24}
MATRIX = (
    "forward_kernel",
    "dq_kernel",
    "dkdv_kernel",
    "grouped_rows_kernel",
    "grouped_weight_grad_kernel",
)
SMALL = (
    "combine_kernel",
    "sum_partials_kernel",
    "column_sum_kernel",
    "expert_count_kernel",
    "expert_scan_kernel",
    "expert_place_kernel",
    "row_tiles_kernel",
)
# (Triton, case, kernel) -> spill accesses tolerated, with the reason
SPILLS = {
    # two of 3152 instructions, with dropout of attention weights only; 3.9 has none
    ("3.6.0", "attention 128 dropout", "dkdv_kernel"): 2,
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    """Rows of the table as this Triton makes them, by architecture and in it case by case.

    Two processes make all: to start one takes as long as to compile many kernels.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", "tests.kernels.aot", "--parts", "2"]
    command += ["--capability", *map(str, CAPABILITIES)]
    parts = [
        subprocess.Popen(
            [*command, "--part", str(part)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(2)
    ]
    with ThreadPoolExecutor() as pool:  # both are read at once: neither waits for a full pipe
        outputs = list(pool.map(subprocess.Popen.communicate, parts))
    for part, (_, errors) in zip(parts, outputs, strict=True):
        assert part.returncode == 0, errors[-4000:]
    rows = by_case(json.loads(line) for out, _ in outputs for line in out.splitlines())
    architectures = [f"sm_{capability}" for capability in CAPABILITIES]
    return {arch: [row for row in rows if row["arch"] == arch] for arch in architectures}


def by_case(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted by case; a case's kernels stay in their order."""
    return sorted(rows, key=lambda row: str(row["case"]))


def committed() -> list[dict[str, Any]]:
    """Rows of the committed table, of every Triton version in it."""
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def faults(row: dict[str, Any]) -> list[str]:
    """What breaks the limits of any kernel."""
    name = (row["case"], row["kernel"])
    matrix = row["kernel"] in MATRIX
    small = row["kernel"] in SMALL
    found = []
    if row["spills"] > SPILLS.get((row["triton"], *name), 0):
        found.append(f"{row['spills']} spill accesses")
    if row["shared_bytes"] > SHARED_LIMIT:
        found.append(f"{row['shared_bytes']} bytes of shared memory")
    if row["registers"] * row["warps"] * 32 > REGISTERS:
        found.append(f"{row['registers']} registers in {row['warps']} warps")
    if matrix and (row["hgmma"] == 0 or row["hmma"] > 0):
        found.append(f"{row['hgmma']} HGMMA, {row['hmma']} HMMA")
    if row["narrow"] > NARROW_BY_KERNEL.get(row["kernel"], NARROW):
        found.append(f"{row['narrow']} narrow accesses")
    reads_by_row = row["kernel"] in ("stats_kernel", "delta_kernel", "norm_weight_grad_kernel")
    sums = row["kernel"] == "sum_squares_kernel"
    if not (matrix or small) and row["wide_loads"] == 0:
        found.append("no 128-bit loads")
    if not (matrix or small or reads_by_row or sums) and row["wide_stores"] == 0:
        found.append("no 128-bit stores")
    return [f"{name}: {fault}" for fault in found]


def regressions(row: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What got worse by more than noise of a compiler."""
    found = [
        f"{row['case']} {row['kernel']}: {key} {before[key]} -> {row[key]}"
        for key in ("registers", "instructions", "shared_bytes")
        if row[key] > GROWTH * before[key]
    ]
    found += [
        f"{row['case']} {row['kernel']}: {key} {before[key]} -> {row[key]}"
        for key in ("wide_loads", "wide_stores", "tma_loads")
        if row[key] < before[key] / GROWTH
    ]
    return found


@pytest.mark.long
def test_every_kernel_keeps_the_limits_on_sm90(compiled: dict[str, list[dict[str, Any]]]) -> None:
    rows = compiled["sm_90"]
    assert rows
    assert [fault for row in rows for fault in faults(row)] == []
    before = by_case(x for x in committed() if x["triton"] == rows[0]["triton"])
    if before:
        names = [(x["case"], x["kernel"]) for x in rows]
        assert names == [(x["case"], x["kernel"]) for x in before], "write the table again"
        worse = [regressions(a, b) for a, b in zip(rows, before, strict=True)]
        assert [fault for found in worse for fault in found] == []


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_every_kernel_compiles_for_other_architectures(
    arch: str, compiled: dict[str, list[dict[str, Any]]]
) -> None:
    found = {row["kernel"] for row in compiled[arch]}
    assert found == {row["kernel"] for row in committed()}


def test_the_committed_table_keeps_the_limits() -> None:
    table = committed()
    assert {x["triton"] for x in table} >= {"3.6.0", "3.9.0"}
    assert [fault for row in table for fault in faults(row)] == []


def test_planted_regressions_are_found() -> None:
    row = {
        "triton": "3.9.0",
        "case": "swiglu",
        "kernel": "swiglu_kernel",
        "warps": 4,
        "registers": 32,
        "spills": 0,
        "shared_bytes": 0,
        "instructions": 100,
        "hgmma": 0,
        "hmma": 0,
        "wide_loads": 2,
        "wide_stores": 1,
        "tma_loads": 0,
        "narrow": 0,
    }
    assert faults(row) == []
    assert regressions(row, row) == []
    for change in (
        {"spills": 1},
        {"shared_bytes": 1 << 20},
        {"registers": 255, "warps": 16},
        {"narrow": 48},
        {"wide_loads": 0},
        {"wide_stores": 0},
        {"kernel": "dq_kernel"},
        {"kernel": "dq_kernel", "hgmma": 4, "hmma": 1},
    ):
        assert len(faults({**row, **change})) == 1, change
    for change in ({"registers": 36}, {"instructions": 111}, {"wide_loads": 1}):
        assert len(regressions({**row, **change}, row)) == 1, change
