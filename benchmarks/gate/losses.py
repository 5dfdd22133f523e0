"""The second part of gpu_gate: losses of training on Triton beside those on plain torch.

The same weights see the same batch in every step, so that the loss falls, and falls otherwise where
a gradient or an update is wrong. That it fell by far more than the bound is asked as well.
"""

from __future__ import annotations

from benchmarks.gate.device import Gate
from benchmarks.gate.train import batches_of, config_of
from megalite.config import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.train.engine import Engine

STEPS, DRY_STEPS = 6, 3
BOUNDS = {"bfloat16": 2e-2, "float32": 1e-4}  # of the difference, in nats
FALL = 10  # bounds by which the loss must fall
_LAYERS, _LENGTH, _LR = 4, 2048, 1e-4


def losses(gate: Gate) -> None:
    """One row: the losses of both, their largest difference and its bound."""
    found = {}
    for backend in ("reference", "interpret" if gate.dry else "triton"):
        gate.require(0.0, f"losses on {backend}")
        length, layers = (8, 1) if gate.dry else (_LENGTH, _LAYERS)
        config = config_of(gate, length, backend, num_layers=layers)
        found[backend] = train(gate, config)
        gate.free()
    gate.emit(judged(found, config.train.dtype))


def train(gate: Gate, config: RunConfig) -> list[float]:
    """The losses of some steps on one batch."""
    mesh = Mesh(Topology(), gate.device)
    mesh.create()
    engine = Engine(config, mesh)
    found = []
    for _ in range(DRY_STEPS if gate.dry else STEPS):
        loss, _ = engine.train_step(batches_of(gate, config, 0), _LR)
        found.append(float(loss))
    return found


def judged(found: dict[str, list[float]], dtype: str) -> dict[str, object]:
    """The row of two backends' losses: right if they agree and fall."""
    plain, ours = found.values()
    bound = BOUNDS[dtype]
    differences = [abs(a - b) for a, b in zip(plain, ours, strict=True)]
    fell = plain[0] - plain[-1]
    faults = [
        f"step {step + 1}: {a} on plain torch and {b} differ by more than {bound:g}"
        for step, (a, b) in enumerate(zip(plain, ours, strict=True))
        if not abs(a - b) <= bound
    ]
    if not fell > FALL * bound:
        faults.append(f"the loss fell by {fell:.3g}, too little to see a wrong gradient")
    return {
        "kernel": "losses",
        "dtype": dtype,
        "correct": not faults,
        "losses": found,
        "error_over_bound": max(differences) / bound,
        "faults": faults,
    }
