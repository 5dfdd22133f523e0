"""`kernels.backend=interpret` as a user has it: one variable, no test's repairs around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from megalite.kernels import Kernels, select

torch.manual_seed(0)
ops, plain = select("interpret", dtype=torch.bfloat16), Kernels()
x, w, dy = (torch.randn(*shape).bfloat16() for shape in ((5, 40), (40,), (5, 40)))
label = torch.tensor([3, 39, 0, -100, 7])


def results(k):
    y, s, _, rstd = k.norm(x, w, None, 1e-5, dy)
    dx, dweight, _ = k.norm_grad(dy, s, w, None, rstd)
    stats = k.cross_entropy_stats(x, label, 0, 37).unsqueeze(0)
    loss, lse = k.cross_entropy_combine(stats, label)
    grad = k.cross_entropy_grad_(x.clone(), label, lse, torch.ones(5), 0, 37)
    return y, dx, dweight.sum(0), loss, grad, k.swiglu(x)


assert ops.name == "interpret"
for got, want in zip(results(ops), results(plain), strict=True):
    assert got.dtype == want.dtype
    assert (got.double() - want.double()).norm() <= 1e-2 * want.double().norm()
"""


def test_its_numbers_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Triton's own interpreter computes on the bits of bfloat16 and fails on mixed conditions."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
