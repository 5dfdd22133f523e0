"""The expected time of a transformer layer on a GPU, by parts: arithmetic, no measurement.

FLOPs and bytes are counted (model_math, the layer's kernels, the collectives of sequence
parallelism); the rates at which a GPU gets through them are assumptions of this file, until rows of
gpu_gate replace them. One microbatch, forward and backward, no recomputation.

    python -m benchmarks.expected_layer                        Llama 8B on an H100, four layouts
    python -m benchmarks.expected_layer llama-8b-64gpu --tp 2 --hardware b200
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megalite.checks import open_run
from megalite.config import ModelConfig
from megalite.run.hardware import Hardware, named_hardware
from megalite.run.model_math import forward_flops

# Shares of the data sheet's figures that kernels and NCCL are assumed to reach.
PRODUCTS = 0.70  # of the peak: large bf16 products of cuBLAS
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.485, 0.355  # of the peak: Triton, 480 and 350 TFLOP/s
MEMORY = 0.85  # of the bandwidth: kernels that only move data
LINKS = 0.80  # of a direction of NVLink: NCCL, one collective at a time
START_S = 10e-6  # of a collective, beside its bytes
EXPOSED = 6  # of the 10 collectives of a layer: four of the forward, two before a product
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of a layer, forward and backward, on one rank of a tensor-parallel group."""

    tp: int
    products: float
    attention_forward: float
    attention_backward: float
    elementwise: float
    exposed: float

    @property
    def total(self) -> float:
        """The sum of the parts: nothing but what is called hidden overlaps."""
        attention = self.attention_forward + self.attention_backward
        return self.products + attention + self.elementwise + self.exposed


def layer_time(model: ModelConfig, tokens: int, tp: int, hardware: Hardware) -> LayerTime:
    """The parts of a layer over one sequence of `tokens` tokens, in bfloat16."""
    peak = hardware.peak_tflops["bfloat16"] * 1e12
    flops = forward_flops(model, tokens)
    scale = tokens / model.num_layers / tp
    weights = (flops.qkv + flops.attention_out + flops.mlp) * scale
    scores = flops.attention_causal * scale
    moved = layer_bytes(model, tokens, tp) / (MEMORY * hardware.memory_gb_per_s * 1e9)

    shared = tokens * model.hidden_size * BF16 * (tp - 1) / tp
    link = LINKS * hardware.nvlink_gb_per_s * 1e9
    exposed = EXPOSED * (shared / link + START_S) if tp > 1 else 0.0
    return LayerTime(
        tp,
        # A backward has twice the products of a forward; attention's has five for two.
        1e3 * 3 * weights / (PRODUCTS * peak),
        1e3 * scores / (ATTENTION_FORWARD * peak),
        1e3 * 2.5 * scores / (ATTENTION_BACKWARD * peak),
        1e3 * moved,
        1e3 * exposed,
    )


def layer_bytes(model: ModelConfig, tokens: int, tp: int) -> float:
    """Bytes that the kernels between the products read and write, and those of weight gradients."""
    stream = tokens // tp * model.hidden_size
    heads = model.num_heads * model.head_size // tp
    qkv = heads + 2 * model.kv_heads * model.head_size // tp
    wide = model.ffn_hidden_size // tp
    # Two norms: x and the residual in, the sum and the normed out; four again in the backward.
    norms = 2 * (4 + 4) * stream
    rotation = 2 * 2 * tokens * qkv
    delta = 2 * tokens * heads
    # The gate's two halves in and one out; their gradients, and the output again, in the backward.
    activation = (3 + 6) * tokens * wide if model.gated else (2 + 4) * tokens * wide
    weights = model.hidden_size * (qkv + heads + (3 if model.gated else 2) * wide)
    return BF16 * (norms + rotation + delta + activation) + 2 * FP32 * weights


def table(model: ModelConfig, tokens: int, sizes: list[int], hardware: Hardware) -> list[str]:
    """Lines of markdown: a column for each size of the tensor-parallel group."""
    flops = forward_flops(model, tokens)
    per_token = 3 * (flops.total_causal - flops.head)
    times = [layer_time(model, tokens, tp, hardware) for tp in sizes]
    rates = [tokens / (time.total * 1e-3) / time.tp / model.num_layers for time in times]
    peak = hardware.peak_tflops["bfloat16"] * 1e12
    rows = {
        "products, ms": [f"{time.products:.2f}" for time in times],
        "attention, forward": [f"{time.attention_forward:.2f}" for time in times],
        "attention, backward": [f"{time.attention_backward:.2f}" for time in times],
        "elementwise": [f"{time.elementwise:.2f}" for time in times],
        "collectives": [f"{time.exposed:.2f}" for time in times],
        "layer, ms": [f"{time.total:.2f}" for time in times],
        "tokens/s a GPU": [f"{rate:,.0f}" for rate in rates],
        "MFU, causal": [f"{100 * rate * per_token / peak:.0f} %" for rate in rates],
    }
    lines = [("part", *(f"tp {tp}" for tp in sizes)), ("---",) * (1 + len(sizes))]
    lines += [(name, *cells) for name, cells in rows.items()]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", default="llama-8b-64gpu")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--hardware", default="h100")
    arguments = parser.parse_args()
    config = open_run(arguments.config).config
    hardware = named_hardware(arguments.hardware)
    print("\n".join(table(config.model, config.data.seq_length, arguments.tp, hardware)))


if __name__ == "__main__":
    main()
