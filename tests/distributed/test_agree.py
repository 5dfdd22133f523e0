"""What ranks and runs must agree on before a step is taken."""

from __future__ import annotations

import hashlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.data.dataset import TokenDataset
from megalite.data.sidecar import Sidecar, SourceInfo, TokenizerInfo
from megalite.distributed.agree import (
    PeerFailedError,
    Ranks,
    on_all_ranks,
    on_first_rank,
)
from megalite.distributed.equality import require_same_config
from megalite.errors import EXIT_SAVED, CheckpointError, ConfigError, DataError
from megalite.record.records import lock_folder, read_metrics
from megalite.train.run_data import open_data
from tests.checkpoint.kit import run_ranks
from tests.pool import RankPool
from tests.train.kit.runs import lines, make_config, make_trainer, train, write_tokens


def divide(divisor: int) -> int:
    return 1 // divisor


def in_gloo_ranks(ctx: Any) -> list[Any]:
    """Runs in a rank: an agreed result, then errors that one rank and that two ranks meet."""
    ranks = Ranks(ctx.mesh().world)
    found: list[Any] = [
        on_all_ranks(ranks, lambda: ranks.rank),
        on_first_rank(ranks, lambda: {"from": ranks.rank, "text": "\0\xff"}),
        ranks.gather("x" * ranks.rank),
        ranks.any(ranks.rank == 1),
        ranks.any(False),
    ]
    for doing, divisor in (("", 2), ("here", 2), ("here", 0)):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            on_all_ranks(ranks, partial(divide, divisor and divisor - ranks.rank), doing)
        found.append((type(caught.value).__name__, str(caught.value)))
    return found


def test_all_ranks_have_the_result_or_the_error(pool: RankPool) -> None:
    text = "rank 2: ZeroDivisionError: integer division or modulo by zero"
    for rank, found in enumerate(pool.run(in_gloo_ranks, 3)):
        assert found[0] == rank
        assert found[1] == {"from": 0, "text": "\0\xff"}
        assert found[2] == (["", "x", "xx"] if rank == 0 else [])
        assert found[3:5] == [True, False]
        own = ("ZeroDivisionError", text.partition("Error: ")[2])
        assert found[5] == (own if rank == 2 else (PeerFailedError.__name__, text))
        assert found[6] == (CheckpointError.__name__, f"here: {text}")
        assert found[7] == (
            CheckpointError.__name__,
            f"here: {text.replace('rank 2', 'rank 0 and 2 more')}",
        )


def test_many_different_failures_are_cut_short() -> None:
    def fail(ranks: Ranks) -> None:
        on_all_ranks(ranks, lambda: dict[int, int]()[ranks.rank], "doing this")

    errors = run_ranks(5, fail)
    assert len({str(e) for e in errors}) == 1
    assert str(errors[0]).endswith("and 2 other failures")
    assert isinstance(errors[3], CheckpointError)
    assert isinstance(errors[3].__cause__, KeyError)


def test_a_process_alone_raises_its_own_error_and_keeps_its_result() -> None:
    assert on_first_rank(Ranks(), lambda: (1, 2)) == (1, 2)
    with pytest.raises(KeyError):
        on_all_ranks(Ranks(), lambda: dict[int, int]()[0])
    with pytest.raises(CheckpointError, match=r"^here: KeyError: 0$"):
        on_all_ranks(Ranks(), lambda: dict[int, int]()[0], "here")


def agree(ctx: Any, config: RunConfig, odd_rank: int, odd: RunConfig) -> str:
    try:
        require_same_config(odd if ctx.rank == odd_rank else config, ctx.mesh())
    except ConfigError as error:
        return str(error)
    return ""


def test_one_rank_with_another_setting_is_named_on_every_rank(
    pool: RankPool, tmp_path: Path
) -> None:
    config = make_config(tmp_path, "run", "dp4")
    assert pool.run(agree, 4, config, -1, config) == [""] * 4
    odd = make_config(tmp_path, "run", "dp4", optimizer__lr=0.1)
    told = pool.run(agree, 4, config, 2, odd)
    assert told == [told[0]] * 4
    assert told[0] == (
        "rank 2 has optimizer.lr=0.1, rank 0 has 0.01\nstart every rank with the same config"
    )


def test_a_run_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    held = lock_folder(tmp_path, print)
    with pytest.raises(ConfigError, match="is in use by another run"):
        lock_folder(tmp_path, print)
    held.close()
    lock_folder(tmp_path, print).close()


def test_an_evaluation_due_where_a_run_was_stopped_is_not_lost(
    pool: RankPool, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "data", 60)
    options: dict[str, Any] = {
        "eval__interval": 2,
        "eval__batches": 1,
        "data__split": (0.8, 0.2),
    }
    config = make_config(tmp_path, "stopped", train__steps=6, **options)
    pool.run(train, 1, [(config, 4), (config, None)])
    assert [line["step"] for line in lines(tmp_path / "stopped", "eval")] == [2, 4, 6]


def test_another_tokenizer_than_the_datasets_is_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "data", 60)
    made_by, other = tmp_path / "a.model", tmp_path / "b.model"
    made_by.write_bytes(b"one")
    other.write_bytes(b"two")
    data = TokenDataset(prefix)
    sidecar = Sidecar(
        vocab_size=97,
        eos_id=0,
        max_id=96,
        num_tokens=data.num_tokens,
        num_documents=data.num_documents,
        dtype=data.indexed.dtype.name,
        fingerprint=data.fingerprint,
        tokenizer=TokenizerInfo(
            file="a.model", sha256=hashlib.sha256(b"one").hexdigest(), trained=True
        ),
        source=SourceInfo(description="test", text_bytes=1, skipped={}),
    )
    Path(f"{prefix}.json").write_bytes(sidecar.to_bytes())
    open_data(make_config(tmp_path, "run", data__tokenizer=str(made_by)))
    with pytest.raises(DataError, match=r"b\.model .* did not make .*data, which a\.model did"):
        open_data(make_config(tmp_path, "run", data__tokenizer=str(other)))


def test_state_is_saved_before_an_evaluation(pool: RankPool, tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", 60)
    options: dict[str, Any] = {
        "eval__interval": 2,
        "data__split": (0.8, 0.2),
        "checkpoint__interval": 2,
    }
    config = make_config(tmp_path, "order", train__steps=4, **options)
    pool.run(train, 1, [(config, None)])
    kinds = [line["kind"] for line in read_metrics(tmp_path / "order" / "metrics.jsonl")]
    done = ["step", "step", "checkpoint", "eval"]
    assert kinds == ["run", *done, *done, "end"]


def cut_short(ctx: Any, config: RunConfig) -> list[int]:
    """Runs in a rank: exit codes of a run that is signalled in an evaluation, and of the next."""
    codes = []
    for attempt in range(2):
        trainer = make_trainer(ctx, config)
        forward, seen = trainer.engine.forward_only, 0

        def listen(micro_batches: Any, trainer: Any = trainer, forward: Any = forward) -> Any:
            nonlocal seen
            seen += 1
            if seen == 3 and ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)  # to one rank only
            return forward(micro_batches)

        if attempt == 0:
            trainer.engine.forward_only = listen
        codes.append(trainer.run())
    return codes


def test_a_signal_cuts_an_evaluation_short_and_the_next_attempt_makes_up_for_it(
    pool: RankPool, tmp_path: Path
) -> None:
    """Two batches a set: the signal comes in the second evaluation, which is the last step's."""
    write_tokens(tmp_path / "data", 60)
    options = {"eval__interval": 2, "eval__batches": 2, "data__split": (0.8, 0.2)}
    config = make_config(tmp_path, "cut", "dp2", train__steps=4, **options)
    assert pool.run(cut_short, 2, config) == [[EXIT_SAVED, 0]] * 2
    assert [line["step"] for line in lines(tmp_path / "cut", "eval")] == [2, 4]
    assert [line["step"] for line in lines(tmp_path / "cut", "step")] == [1, 2, 3, 4]
