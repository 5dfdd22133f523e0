"""The parts of gpu_gate that time: ceilings, rates of our kernels, their rivals, launches.

Ceilings are measured in the same run: a copy of memory, and a product of random matrices (of
zeros it would be faster). A rate is least bytes or model FLOPs over the time; its fraction is that
of the copy, or of the product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.gate.cases import CASES as POINTWISE
from benchmarks.gate.cases import Case, Shape
from benchmarks.gate.check import is_timed
from benchmarks.gate.device import Gate, Inputs, Late, Row, describe
from benchmarks.gate.rivals import RIVALS
from benchmarks.gate.table import LAYER_BUDGET_MS
from benchmarks.gate.train import batches_of, config_of, profiled
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.train.engine import Engine

_COMPILE_S = 15.0  # left of the part, for a rival that compiles
_FEW_TOKENS = 256  # of a microbatch whose layer the device has done before the host goes on


def ceilings(gate: Gate) -> dict[str, float]:
    """Rate of a copy in TB/s and of a bfloat16 product in TFLOP/s."""
    elements, side = (1 << 12, 64) if gate.dry else (1 << 30, 8192)

    def buffers(seed: int) -> Inputs:
        source = gate.draw(elements, dtype=torch.bfloat16, seed=seed)
        return {"from": source, "to": torch.empty_like(source)}

    seconds = gate.time_s(lambda i: i["to"].copy_(i["from"]), gate.input_sets(buffers))
    found = {"copy_tb_per_s": 4 * elements / seconds / 1e12}
    gate.free()

    def matrices(seed: int) -> Inputs:
        a, b = (gate.draw(side, side, dtype=torch.bfloat16, seed=2 * seed + i) for i in (0, 1))
        return {"a": a, "b": b, "out": torch.empty_like(a)}

    sets = gate.input_sets(matrices)
    seconds = gate.time_s(lambda i: torch.mm(i["a"], i["b"], out=i["out"]), sets)
    return found | {"gemm_tflop_per_s": 2 * side**3 / seconds / 1e12}


def timed_cases() -> list[Case]:
    """What is timed, the most important first."""
    from benchmarks.gate.attention import CASES as ATTENTION
    from benchmarks.gate.cases_loss import CASES as LOSS
    from benchmarks.gate.cases_moe import CASES as EXPERTS

    attention = [case for case in ATTENTION if is_timed(case)]
    return [*attention[:2], *LOSS, *POINTWISE, *attention[2:], *EXPERTS]


def rates(gate: Gate) -> None:
    """Our kernels, each alone and first of all; then the rivals of each."""
    cases, seconds = timed_cases(), {}
    for case in cases:
        shape = timed_shape(gate, case)
        if late(gate, case.name):
            continue
        with gate.guarded({"kernel": case.name, "shape": dict(shape)}):
            sets = gate.input_sets(partial(case.make, gate, shape, case.dtypes[0]))
            seconds[case.name] = gate.time_s(case.run, sets)
            gate.emit(rate_row(gate, case, sets[0], seconds[case.name]))
    for case in cases:
        if case.name in seconds:
            rivals(gate, case, seconds[case.name])


def timed_shape(gate: Gate, case: Case) -> Shape:
    return case.shapes.dry[0] if gate.dry else case.shapes.timed


def late(gate: Gate, name: str) -> bool:
    """Whether the time is up; a row says what is left out for it."""
    try:
        gate.require(0.0, name)
    except Late as error:
        gate.emit({"kernel": name, "skipped": [name], "reason": str(error)})
        return True
    return False


def rate_row(gate: Gate, case: Case, inputs: Inputs, seconds: float) -> Row:
    """A case's time, rate and fraction of the ceiling that it is bound by."""
    matrix = case.kind.startswith(("attention", "grouped"))
    unit, ceiling = ("tflop_per_s", "gemm_tflop_per_s") if matrix else ("tb_per_s", "copy_tb_per_s")
    rate = case.work(inputs) / seconds / 1e12
    bound = gate.ceilings.get(ceiling)
    return {
        "kernel": case.name,
        "kind": case.kind,
        "shape": dict(timed_shape(gate, case)),
        "dtype": str(case.dtypes[0]).removeprefix("torch."),
        "ms": seconds * 1e3,
        unit: rate,
        "fraction": rate / bound if bound else None,
    }


def rivals(gate: Gate, case: Case, ours_s: float) -> None:
    """What else does the same on the same inputs, in rows of their own."""
    shape = timed_shape(gate, case)
    for name, make in RIVALS.get(case.name, {}).items():
        row: Row = {"kernel": case.name, "rival": name}
        try:
            gate.require(_COMPILE_S if "compile" in name and not gate.dry else 0.0, name)
            call = make(gate.dry)
            sets = gate.input_sets(partial(case.make, gate, shape, case.dtypes[0]))
            seconds = gate.time_s(call, sets)
            gate.emit({**row, "ms": seconds * 1e3, "ours_times_faster": seconds / ours_s})
        except Late as error:
            gate.emit({**row, "skipped": [name], "reason": str(error)})
        except Exception as error:
            gate.emit({**row, "absent": describe(error)})
            gate.require_alive()
        sets = []
        gate.free()


# --- launches ------------------------------------------------------------------------------------


def launch_calls(gate: Gate) -> dict[str, Callable[[], object]]:
    """Calls so small that only starting them takes time."""
    from benchmarks.gate.attention import CASES as ATTENTION
    from benchmarks.gate.cases_loss import CASES as LOSS

    cases = {case.name: case for case in (*POINTWISE, *LOSS, *ATTENTION)}
    small = {
        "rms_norm": {"T": 8, "D": 256},
        "swiglu": {"T": 8, "f": 256},
        "adamw": {"n": 1024},
        "attention 64": {"T": 128, "B": 1, "N": 2, "K": 1, "H": 64, "W": 0, "C": 1, "p": 0},
    }
    if gate.dry:
        small = {name: small[name] for name in ("rms_norm", "adamw")}
    calls: dict[str, Callable[[], object]] = {}
    for name, shape in small.items():
        case = cases[name]
        inputs = case.make(gate, shape, case.dtypes[0], 0)
        calls[name] = partial(case.run, inputs)
    x, weight = gate.draw(8, 256), gate.draw(256)
    calls["torch F.rms_norm"] = lambda: F.rms_norm(x, (256,), weight, 1e-5)
    return calls


def launches(gate: Gate) -> None:
    """Host time of a call, and device time of one in a CUDA graph, in microseconds."""
    repeats = 2 if gate.dry else 300
    for name, call in launch_calls(gate).items():
        with gate.guarded({"kernel": name}):
            for _ in range(1 if gate.dry else 20):
                call()
            gate.synchronize()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            host_us = (time.perf_counter() - began) / repeats * 1e6
            gate.synchronize()
            gate.emit({"kernel": name, "host_us": host_us, "graph_us": graph_us(gate, call)})
    with gate.guarded({"kernel": "layer"}):
        gate.emit(layer_row(gate))


def layer_row(gate: Gate) -> Row:
    """Host time, and launches, of a layer's forward and backward in a microbatch of few tokens.

    They are the difference of two models, so that neither the loss nor the edges of a step count.
    A dry run counts torch's operations instead of launches.
    """
    layers, seconds, calls, count = ((1, 2) if gate.dry else (2, 10)), [], [], 1
    for num_layers in layers:
        length, backend = (8, "reference") if gate.dry else (_FEW_TOKENS, "triton")
        config = config_of(gate, length, backend, num_layers=num_layers, micro_batch=1)
        mesh = Mesh(Topology(), gate.device)
        mesh.create()
        engine, batches = Engine(config, mesh), batches_of(gate, config, 0)
        count = len(batches)

        times = []
        for _ in range(3 if gate.dry else 20):
            gate.synchronize()
            began = time.perf_counter()
            engine.forward_backward(batches)
            gate.synchronize()
            times.append(time.perf_counter() - began)
            engine.optimizer.step(0.0, skip_update=True)
        seconds.append(median(times[1:]))  # the first one compiles
        found = profiled(gate, partial(engine.forward_backward, batches))
        calls.append(sum(event.count for event in found if gate.dry or "Launch" in event.key))
    share = (layers[1] - layers[0]) * count
    return {
        "kernel": "layer",
        "layer_ms": (seconds[1] - seconds[0]) / share * 1e3,
        "budget_ms": LAYER_BUDGET_MS,
        "launches": (calls[1] - calls[0]) / share,
    }


def graph_us(gate: Gate, call: Callable[[], object], calls: int = 50) -> float | None:
    """Device time of a call that a CUDA graph repeats; None without CUDA."""
    if gate.device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return gate.time_s(lambda _: graph.replay(), [{}]) / calls * 1e6
