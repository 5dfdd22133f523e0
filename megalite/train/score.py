"""`megalite eval` after its options: the losses of a checkpoint over datasets, at any layout.

It has a forward alone: no optimizer, and weights in the run's own type. Nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import NamedPiece
from megalite.checks import check_and_resolve
from megalite.config import EvalConfig, OptimizerConfig, PipelineConfig, RunConfig
from megalite.config.saved import saved_config
from megalite.config.schema import CheckpointConfig, EvalSetConfig, KernelsConfig, LogConfig
from megalite.distributed.agree import Ranks, on_all_ranks
from megalite.distributed.mesh import Mesh
from megalite.errors import CheckpointError, ConfigError
from megalite.exchange.folder import open_weights
from megalite.process.launcher import Launch
from megalite.train.engine import Scorer
from megalite.train.evaluate import EvalResult, evaluate
from megalite.train.rank import joined_mesh
from megalite.train.run_data import open_data, open_named_sets
from megalite.train.run_tokenizer import run_tokenizer


@dataclass(frozen=True)
class ScoreRequest:
    """A checkpoint, by the path of a run or `hf:FOLDER`, and what is evaluated of it.

    sets: (name, prefix) of datasets; none: the run's own. micro_batch, seq_length: None takes the
    run's own.
    """

    source: str
    step: int | None
    weights: str
    sets: Sequence[tuple[str, str]]
    batches: int | None
    micro_batch: int | None
    seq_length: int | None
    tokenizer: str | None


def score_config(
    checkpoint: Checkpoint, request: ScoreRequest, tp: int, pp: int, dp: int
) -> RunConfig:
    """The config of an evaluation at a layout, resolved. Raises ConfigError where it does not fit.

    Of the run it keeps the model, the data and the type it computed in.
    """
    saved = saved_config(checkpoint.manifest.config, str(checkpoint.path))
    if request.weights == "ema" and saved.optimizer.ema_decay is None:
        raise ConfigError(
            f"{checkpoint.path} holds no average of the weights (optimizer.ema_decay was not set); "
            "leave out --ema"
        )
    if not request.sets and saved.data.path == "none":
        raise ConfigError(f"{request.source} has no data of its own; give --data PREFIX")
    length = request.seq_length or saved.data.seq_length
    layout = {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "vpp": 1,
        "stage_layers": None,
        "sequence_parallel": saved.parallel.sequence_parallel and tp > 1,
    }
    micro_batch = request.micro_batch or saved.train.micro_batch
    batch = {
        "steps": 0,
        "tokens": None,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * dp * 2 * pp,  # so that a pipeline is full half of the time
        "recompute": "none",
        **{f"batch_ramp_{name}": None for name in ("start", "increment", "samples", "tokens")},
    }
    named = [EvalSetConfig(name=name, path=path) for name, path in request.sets]
    reference = saved.kernels.backend == "reference"
    changes = {
        "parallel": saved.parallel.model_copy(update=layout),
        "pipeline": PipelineConfig(schedule="1f1b"),
        "optimizer": OptimizerConfig(),
        "data": saved.data.model_copy(update={"seq_length": length, "prepare": []}),
        "train": saved.train.model_copy(update=batch),
        "kernels": KernelsConfig(backend="reference" if reference else "auto"),
        "eval": EvalConfig(
            interval=1,
            batches=request.batches,
            sets=named if named else saved.eval.sets,
        ),
        "checkpoint": CheckpointConfig(),
        "log": LogConfig(),
    }
    return check_and_resolve(saved.model_copy(update=changes), tp * pp * dp)


def score_rank(
    launch: Launch, device: torch.device, config: RunConfig, request: ScoreRequest, as_json: bool
) -> int:
    """One rank of an evaluation, inside its process group; the first one prints."""
    with joined_mesh(launch, device, config) as mesh:
        results = score(mesh, config, request)
        if mesh.rank == 0:
            print_results(results, as_json)
    return 0


def score(mesh: Mesh, config: RunConfig, request: ScoreRequest) -> list[EvalResult]:
    """The result of each set; all ranks of the mesh call it."""
    ranks = Ranks(mesh.world)
    checkpoint = open_weights(request.source, ranks, request.step)

    # Bytes are counted where there is a tokenizer, and data of another one is refused.
    try:
        tokenizer = run_tokenizer(checkpoint, config, request.tokenizer)
    except ConfigError:
        tokenizer = None
    path = None if tokenizer is None else str(tokenizer.files.path)
    data = config.data.model_copy(update={"tokenizer": path})
    config = config.model_copy(update={"data": data})

    def open_sets() -> Any:
        return open_named_sets(config) if request.sets else open_data(config).sets

    sets = on_all_ranks(ranks, open_sets)
    if not sets:
        raise ConfigError(f"{request.source} evaluates no data of its own; give --data PREFIX")

    scorer = Scorer(config, mesh)
    pieces = [
        NamedPiece.of_shard(request.weights, spec, axis.size, axis.rank, param.detach())
        for chunk in scorer.chunks
        for param, spec in chunk.named_params()
        for axis in [mesh.axis(spec.grid.cut_axis)]
    ]
    vocab = config.model.vocab_size
    load(checkpoint, pieces, ranks, whole_kinds=(request.weights,), vocab_size=vocab)
    num_bytes = None if tokenizer is None else tokenizer.num_bytes
    results = evaluate(scorer, sets, num_bytes=num_bytes)
    if results is None:
        raise CheckpointError("the evaluation was cut short")
    return results


def print_results(results: Sequence[EvalResult], as_json: bool) -> None:
    """A line for each set, and for all together where there are several."""
    import json

    from megalite.record.records import plain

    tokens, count = sum(r.tokens for r in results), sum(r.bytes for r in results)
    rows = list(results)
    if len(results) > 1:
        loss = sum(r.loss * r.tokens for r in results) / tokens if tokens else math.nan
        rows.append(EvalResult("all", loss, tokens, count))
    if as_json:
        lines = {row.name: _values(row) for row in rows}
        print(json.dumps(plain(lines), indent=2, allow_nan=False), flush=True)
        return
    width = max(len("set"), *(len(row.name) for row in rows))
    print(f"{'set':<{width}}      loss  perplexity  bits/byte      tokens       bytes")
    for row in rows:
        found = _values(row)
        bits = "n/a" if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f}"
        number = f"{row.bytes:11}" if row.bytes else "        n/a"
        print(
            f"{row.name:<{width}}  {row.loss:8.4f}  {found['perplexity']:10.4g}  {bits:>9}  "
            f"{row.tokens:10}  {number}",
            flush=True,
        )


def _values(result: EvalResult) -> dict[str, Any]:
    perplexity = math.exp(result.loss) if result.loss < 700 else math.inf
    return {
        "loss": result.loss,
        "perplexity": perplexity,
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
        "bytes": result.bytes or None,
    }
