"""Host cost of a layer and microbatch: Python calls, launches, and processor time.

    python -m benchmarks.host_cost [--tp 2] [--rounds 8]

The real engine on Triton's operations, forward and backward, on tiny CPU tensors: every launch goes
through its checks and Triton's dispatch, and the compiled kernel does nothing; collectives are
those of torch's fake group. So all time is the host's. Figures are differences between a model of
six and one of two layers. `calls` counts functions of Python and C that Python calls; launches are
products, Triton's kernels, and other operators of torch that would start a kernel on a GPU.

The Llama layers of transformers, torchtitan and megatron-core are in the row as well where they are
installed, on one rank and uncompiled: their operators compute on the CPU, so that counts compare
and times do so only in part. Appends a JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.circumstances import append_row, circumstances
from megalite.checks import check_and_resolve
from megalite.config import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.kernels.triton.operations import TRITON
from megalite.layout.topology import Topology
from megalite.process.env import end_process, init_process
from megalite.process.launcher import Launch
from megalite.train.batch import TokenBatch
from megalite.train.engine import Engine

_RESULTS = Path(__file__).resolve().parent / "results" / "host_cost.jsonl"
_LAYERS, _MICRO_BATCHES, _TOKENS = (2, 6), 4, 16
_PRODUCTS = ("mm", "addmm", "_linear_pointwise")
# Operators that start no kernel: views, and memory without values.
_NO_KERNEL = (
    "view", "t", "slice", "as_strided", "detach", "alias", "expand", "unsqueeze", "squeeze",
    "select", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
    "_unsafe_view", "split", "split_with_sizes", "transpose", "permute", "unbind",
)  # fmt: skip


class _NoGpu:
    """The answers of a driver before a launch, for a Hopper GPU that is not there."""

    target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Kernel(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel whose launches are counted, and do nothing."""

    module, function, packed_metadata, metadata = None, 0, (), None

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self.name, self.counts = name, counts

    def result(self) -> _Kernel:
        return self

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        self.counts[self.name] += 1


def install_launches() -> Counter[str]:
    """Let Triton neither compile nor launch from now on; returns its launches by kernel."""
    counts: Counter[str] = Counter()

    def compiled(jit: Any, key: str, signature: Any, device: int, *_: Any, **__: Any) -> _Kernel:
        kernel = _Kernel(jit.fn.__name__, counts)
        jit.device_caches[device][0][key] = kernel
        return kernel

    driver.set_active(_NoGpu())
    JITFunction._do_compile = compiled
    return counts


class _Operators(TorchDispatchMode):
    """Counts operators of torch that start a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "aten" and name not in _NO_KERNEL:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def count_calls(work: Callable[[], object]) -> int:
    """Functions of Python and C that Python calls in `work`."""
    count = 0

    def hook(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def cpu_s(work: Callable[[], object], rounds: int) -> float:
    """The least processor time of `work`."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def figures(work: Callable[[], object], triton: Counter[str], rounds: int) -> dict[str, float]:
    """Calls, launches of each kind and processor seconds of `work`, which has run before."""
    triton.clear()
    with _Operators() as operators:
        work()
    launched, ran = Counter(triton), operators.counts
    products = sum(ran[name] for name in ran if name.rstrip("_") in _PRODUCTS)
    return {
        "calls": count_calls(work),
        "products": products,
        "triton": launched.total(),
        "other_launches": ran.total() - products,
        "cpu_ms": 1e3 * cpu_s(work, rounds),
    }


def config_for(tp: int, layers: int) -> RunConfig:
    """A Llama of tiny sizes, whose launches are those of a large one."""
    config = RunConfig.model_validate(
        {
            "model": {
                "num_layers": layers, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4,
                "ffn_hidden_size": 256, "vocab_size": 256,
            },
            "parallel": {"tp": tp, "dp": 1, "sequence_parallel": tp > 1},
            "optimizer": {"zero": 0},
            "data": {"seq_length": _TOKENS},
            "train": {
                "steps": 1, "global_batch": _MICRO_BATCHES, "micro_batch": 1, "dtype": "float32",
            },
        }
    )  # fmt: skip
    return check_and_resolve(config, tp)


def engine_work(mesh: Mesh, layers: int) -> Callable[[], object]:
    """Forward and backward of a step, as the trainer runs it between two readings of the clock."""
    engine = Engine(config_for(mesh.tp.size, layers), mesh)
    tokens = torch.zeros(_TOKENS, dtype=torch.int64)
    weights = torch.zeros(_TOKENS, dtype=torch.float32)
    batch = TokenBatch(tokens, tokens, weights, [0, _TOKENS])

    def work() -> None:
        engine.forward_backward([batch] * _MICRO_BATCHES)
        for reducer in engine.optimizer._reducers:
            reducer.wait()

    return work


def _trained(forward: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Forward and backward on as many microbatches as the engine's."""

    def work() -> None:
        for _ in range(_MICRO_BATCHES):
            forward().sum().backward()

    return work


def transformers_work(layers: int) -> Callable[[], object]:
    """transformers' Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaModel

    sizes = config_for(1, layers).model
    model = LlamaModel(
        LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.ffn_hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.kv_heads,
            use_cache=False,
        )
    ).train()
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64)
    return _trained(lambda: model(tokens).last_hidden_state)


def torchtitan_work(layers: int) -> Callable[[], object]:
    """torchtitan's Llama of its smallest size, with as many layers.

    Its attention is torch's, since what it has for language models is compiled or needs a GPU.
    """
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64)
    return _trained(lambda: model.train()(tokens))


def megatron_work(layers: int) -> Callable[[], object]:
    """megatron-core's GPT with a Llama's traits and sizes, of its own modules.

    Transformer Engine's need a GPU, as do the random states that it keeps for dropout.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    sizes = config_for(1, layers).model
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=sizes.kv_heads,
        ffn_hidden_size=sizes.ffn_hidden_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=sizes.vocab_size,
        max_sequence_length=_TOKENS,
        position_embedding_type="rope",
    ).train()
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64)
    hidden = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool).triu(1)

    def forward() -> torch.Tensor:
        # it makes its rotations on the device that CUDA names
        with patch("torch.cuda.current_device", lambda: torch.device("cpu")):
            out: torch.Tensor = model(tokens, torch.arange(_TOKENS)[None], hidden)
        return out

    return _trained(forward)


# By package, which is also the name in a row's keys.
_OTHERS = {
    "transformers": transformers_work,
    "torchtitan": torchtitan_work,
    "megatron": megatron_work,
}


def a_layer(
    make: Callable[[int], Callable[[], object]], triton: Counter[str], rounds: int
) -> dict[str, float]:
    """Figures of one layer and microbatch: the difference of two depths over their layers."""
    few, many = _LAYERS
    found = []
    for layers in _LAYERS:
        work = make(layers)
        work()
        found.append(figures(work, triton, rounds))
    share = (many - few) * _MICRO_BATCHES
    return {key: round((found[1][key] - found[0][key]) / share, 3) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--date", help="written into the row")
    parser.add_argument("--output", type=Path, default=_RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    triton = install_launches()
    init_process(Launch(rank=0, world_size=options.tp), torch.device("cpu"), 60.0, backend="fake")
    mesh = Mesh(Topology(tp=options.tp))
    mesh.create()

    row = circumstances("host_cost", options.date)
    row |= {"tp": options.tp, "layers": _LAYERS, "micro_batches": _MICRO_BATCHES}
    with patch("megalite.train.engine.choose_kernels", lambda *_: TRITON):
        row |= a_layer(lambda layers: engine_work(mesh, layers), triton, options.rounds)
    lines = []
    for package, make in _OTHERS.items():
        if importlib.util.find_spec(package):
            theirs = a_layer(make, triton, options.rounds)
            row |= {f"{package}_{key}": value for key, value in theirs.items()}
            launches = theirs["products"] + theirs["other_launches"]
            lines.append(
                f"{package}: {theirs['calls']:.0f} calls, {launches:.0f} launches, "
                f"{theirs['cpu_ms']:.2f} ms with its operators on the CPU"
            )
        else:
            lines.append(f"{package}: left out, it is not installed")
    append_row(options.output, row)
    print(
        f"a layer and microbatch at tp {options.tp}: {row['calls']:.0f} calls, "
        f"{row['products']:.0f} products, {row['triton']:.0f} Triton launches, "
        f"{row['other_launches']:.0f} others, {row['cpu_ms']:.2f} ms of the host",
        *lines,
        sep="\n",
    )
    end_process()


if __name__ == "__main__":
    main()
