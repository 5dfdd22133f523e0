"""What the pipeline engine costs where there is no pipeline, and what a split backward costs.

    python -m benchmarks.pipeline_overhead [--rounds 30] [--micro-batches 8]

One process, one thread, the quickstart's model. Three ways to the gradients of the same
microbatches, taken in turns: a plain loop of forward and `backward()`, the engine with the fused
backward, and the engine with input and weight gradients apart (B, then W). Process CPU time;
ratios are formed within a round and are medians over the rounds. Appends a JSON line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.circumstances import append_row, circumstances
from megalite.checks import open_run
from megalite.config import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.pipeline import BoundarySpec, PipelineRuntime
from megalite.schedules import build
from megalite.train.batch import TokenBatch
from megalite.train.engine import Engine

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = Path(__file__).resolve().parent / "results" / "pipeline_overhead.jsonl"
_SERIAL = (
    "parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1",
    "parallel.sequence_parallel=false", "pipeline.schedule=1f1b", "optimizer.zero=0",
)  # fmt: skip


class Ways:
    """The same step three ways, on one model."""

    def __init__(self, config: RunConfig, batches: Sequence[TokenBatch]) -> None:
        self.batches = batches
        self.engine = Engine(config, Mesh(Topology()))
        (self.chunk,) = self.engine.chunks
        tokens = config.train.micro_batch * config.data.seq_length
        boundary = BoundarySpec((tokens, config.model.hidden_size), self.engine.dtype)
        optimizer = self.engine.optimizer
        self.fused, self.split = (
            PipelineRuntime(
                build(name, 1, 1, len(batches)),
                self.engine.chunks,
                self.engine.mesh,
                boundary,
                on_last_backward_start=optimizer.expect_last,
                on_reduce=optimizer.finish_chunk,
            )
            for name in ("1f1b", "zb-h1")
        )

    def plain(self) -> None:
        optimizer = self.engine.optimizer
        optimizer.begin_step()
        for batch in self.batches:
            loss = self.chunk(None, batch)
            if batch is self.batches[-1]:
                optimizer.expect_last(0)
            loss.backward()
        optimizer.finish_chunk(0)
        self._settle()

    def through(self, runtime: PipelineRuntime) -> None:
        self.engine.optimizer.begin_step()
        runtime.run(self.batches)
        self._settle()

    def _settle(self) -> None:
        """The end of a step without its update."""
        for reducer in self.engine.optimizer._reducers:
            reducer.wait()

    def grads(self) -> list[torch.Tensor]:
        return [state.tensor.clone() for state in self.engine.optimizer.named_grads()]


def draw(config: RunConfig, count: int) -> list[TokenBatch]:
    tokens = config.train.micro_batch * config.data.seq_length
    generator = torch.Generator().manual_seed(7)
    bounds = list(range(0, tokens + 1, config.data.seq_length))
    batches = []
    for _ in range(count):
        token_T = torch.randint(0, config.model.vocab_size, (tokens + 1,), generator=generator)
        weight_T = torch.full((tokens,), 1.0 / (tokens * count))
        batches.append(TokenBatch(token_T[:-1], token_T[1:], weight_T, bounds))
    return batches


def cpu_s(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--date", help="written into the row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = open_run(_ROOT / "configs" / "quickstart.toml", _SERIAL).config
    ways = Ways(config, draw(config, options.micro_batches))
    contenders: dict[str, Callable[[], None]] = {
        "plain": ways.plain,
        "engine": lambda: ways.through(ways.fused),
        "engine_split": lambda: ways.through(ways.split),
    }
    found = {}
    for name, work in contenders.items():  # warm, and the same numbers whichever the way
        work()
        found[name] = ways.grads()
    for name in ("engine", "engine_split"):
        for mine, plain in zip(found[name], found["plain"], strict=True):
            assert torch.equal(mine, plain), f"{name} gives other gradients than the plain loop"
    rounds = [{n: cpu_s(w) for n, w in contenders.items()} for _ in range(options.rounds)]
    row = circumstances("pipeline_overhead", options.date)
    row |= {
        "micro_batches": options.micro_batches,
        "rounds": options.rounds,
        "plain_ms_per_micro_batch": 1e3
        * median(r["plain"] for r in rounds)
        / options.micro_batches,
        "engine_over_plain": median(r["engine"] / r["plain"] for r in rounds),
        "split_over_fused": median(r["engine_split"] / r["engine"] for r in rounds),
    }
    append_row(_RESULTS, row)
    print(
        f"plain loop {row['plain_ms_per_micro_batch']:.2f} ms a microbatch; engine / plain "
        f"{row['engine_over_plain']:.4f}; split / fused {row['split_over_fused']:.4f}"
    )


if __name__ == "__main__":
    main()
