"""Changes of settings with which a rank takes less memory; a plan with them shows how much."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config import RunConfig

Change = tuple[str, ...]  # overrides that belong together


def memory_changes(config: RunConfig, *, dp_follows: bool = False) -> Iterator[list[Change]]:
    """Changes of a resolved config that take less memory, by kind, the least change first.

    Roughly in the order of what they cost in speed. dp_follows: parallel.dp follows from the number
    of ranks, so a change of tp or pp need not name it.
    """
    parallel, train = config.parallel, config.train
    assert parallel.dp is not None, "a resolved config has the number of replicas"
    if config.optimizer.zero == 0:
        yield [("optimizer.zero=1",)]
    if not train.loss_chunk_tokens:
        yield [("train.loss_chunk_tokens=2048",)]
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield [("parallel.sequence_parallel=true",)]
    fused = "interleaved" if parallel.vpp > 1 else "1f1b"
    if parallel.pp > 1 and config.pipeline.schedule != fused:
        yield [(f"pipeline.schedule={fused}",)]
    if train.micro_batch > 1:
        sizes = range(train.micro_batch.bit_length() - 1)
        yield [(f"train.micro_batch={train.micro_batch >> (shift + 1)}",) for shift in sizes]
    stricter = {"none": ("selective", "full"), "selective": ("full",), "stage": ("full",)}
    if train.recompute in stricter:
        yield [(f"train.recompute={kind}",) for kind in stricter[train.recompute]]
    for axis, size in (("tp", parallel.tp), ("pp", parallel.pp)):
        wider = [factor for factor in (2, 4, 8) if parallel.dp % factor == 0]
        fewer = {n: () if dp_follows else (f"parallel.dp={parallel.dp // n}",) for n in wider}
        yield [(f"parallel.{axis}={size * n}", *fewer[n]) for n in wider]
