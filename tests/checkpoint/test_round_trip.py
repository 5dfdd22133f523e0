"""What is saved comes back bit for bit, at any cut, in any dtype, without a second copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalite.checkpoint.find import find_latest, open_checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.names import step_name
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.save import save
from megalite.checkpoint.shard_file import DTYPES
from megalite.distributed.agree import Ranks
from megalite.errors import CheckpointError
from megalite.layout.sharding import ShardSpec
from tests.checkpoint.kit import (
    SPECS,
    Cut,
    check_loads,
    in_child,
    make_globals,
    make_pieces,
    ok,
    run_ranks,
    save_globals,
    save_whole,
)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        (Cut(1, 1), [Cut(1, 1), Cut(4, 3)]),
        (Cut(1, 4), [Cut(1, 3), Cut(1, 2), Cut(1, 5)]),
        (Cut(2, 3), [Cut(1, 2), Cut(4, 1), Cut(2, 3)]),
        (Cut(4, 2), [Cut(1, 5), Cut(2, 2), Cut(2, 1)]),
    ],
)
def test_any_cut_loads_any_cut(tmp_path: Path, wrote: Cut, reads: list[Cut]) -> None:
    state = make_globals(seed=1)
    ok(save_globals(tmp_path, 5, state, wrote))
    for cut in reads:
        check_loads(tmp_path, 5, state, cut)


def test_a_chain_of_cuts_loses_nothing(tmp_path: Path) -> None:
    """dp 4 -> 3 -> 2 -> 5, each saved from what the one before loaded."""
    state = make_globals(seed=2)
    ok(save_globals(tmp_path, 0, state, Cut(1, 4)))
    for step, dp in enumerate([3, 2, 5], start=1):

        def again(ranks: Ranks, dp: int = dp, step: int = step) -> None:
            found = find_latest(tmp_path, ranks)
            assert found is not None
            pieces = make_pieces(Cut(1, dp), ranks.rank, None)
            load(found, pieces, ranks)
            save(tmp_path, step, pieces, state={}, config={}, layout={}, ranks=ranks)

        ok(run_ranks(dp, again))
    check_loads(tmp_path, 3, state, Cut(1, 1))


def test_more_ranks_than_elements_leave_empty_shards(tmp_path: Path) -> None:
    spec = ShardSpec("w", (2, 3))
    value = torch.arange(6.0)

    def work(ranks: Ranks) -> Path:
        here = value[ranks.rank : ranks.rank + 1]
        start = min(ranks.rank, 6)
        piece = NamedPiece.of_shard("master", spec, 1, 0, here, start)
        return save(tmp_path, 1, [piece], state={}, config="", layout={}, ranks=ranks)

    path = ok(run_ranks(8, work))[0]
    files = sorted(p.name for p in path.iterdir())
    assert files == ["manifest.json", *(f"rank-{r:05d}.safetensors" for r in range(6))]
    target = torch.zeros(2, 3)
    load(open_checkpoint(path), [NamedPiece.whole("master/w", target)])
    assert torch.equal(target.view(-1), value)


def test_a_rank_without_pieces_takes_part(tmp_path: Path) -> None:
    value = torch.arange(3)

    def work(ranks: Ranks) -> None:
        pieces = [NamedPiece.whole("ids", value.clone())] if ranks.rank else []
        path = save(tmp_path, 1, pieces, state={}, config="", layout={}, ranks=ranks)
        load(open_checkpoint(path, ranks), pieces, ranks)

    ok(run_ranks(2, work))
    assert torch.equal(load_file(tmp_path / step_name(1) / "rank-00001.safetensors")["ids"], value)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_round_trips(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name][0]
    values = {
        "matrix": torch.randint(0, 2, (5, 3)).to(dtype),
        "one": torch.tensor(1, dtype=dtype),
        "none": torch.empty(0, 4, dtype=dtype),
    }
    path = save_whole(tmp_path, 1, values)
    targets = {n: torch.zeros_like(v) for n, v in values.items()}
    load(open_checkpoint(path), [NamedPiece.whole(n, t) for n, t in targets.items()])
    for key, value in values.items():
        assert torch.equal(targets[key], value)
        assert targets[key].dtype == dtype


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -0x00400000 + 3, 1, -(2**31), 0x7F800000], dtype=torch.int32)
    path = save_whole(tmp_path, 1, {"w": bits.view(torch.float32)})
    target = torch.zeros(5)
    load(open_checkpoint(path), [NamedPiece.whole("w", target)])
    assert torch.equal(target.view(torch.int32), bits)


def test_the_library_reads_mixed_widths(tmp_path: Path) -> None:
    """Odd counts of narrow dtypes must not push wide ones off their alignment."""
    values = {
        "a": torch.ones(3, dtype=torch.bool),
        "b": torch.full((3,), 2.0, dtype=torch.bfloat16),
        "c": torch.full((3,), 3.0, dtype=torch.float64),
        "d": torch.full((1,), 4, dtype=torch.int8),
    }
    path = save_whole(tmp_path, 1, values)
    found = load_file(path / "rank-00000.safetensors")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[k], v) for k, v in values.items())
    raw = (path / "rank-00000.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for key, entry in json.loads(raw[8:start]).items():
        assert (start + entry["data_offsets"][0]) % values[key].element_size() == 0


def test_a_tied_copy_is_stored_once_and_loaded_on_both_stages(tmp_path: Path) -> None:
    value = torch.randn(4, 3)

    def work(ranks: Ranks) -> torch.Tensor:
        piece = NamedPiece.whole("param/embedding", value.clone(), owner=ranks.rank == 0)
        path = save(tmp_path, 1, [piece], state={}, config="", layout={"pp": 2}, ranks=ranks)
        piece.data.zero_()
        load(open_checkpoint(path, ranks), [piece], ranks)
        return piece.data

    copies = ok(run_ranks(2, work))
    assert all(torch.equal(c, value.view(-1)) for c in copies)
    assert len(list((tmp_path / step_name(1)).glob("*.safetensors"))) == 1


def test_state_config_and_layout_come_back(tmp_path: Path) -> None:
    state = {"z": [1, 2.5, None, True, "ü"], "a": {"seed": 2**64 - 1, "best": float("inf")}}
    path = save_whole(tmp_path, 12, {}, state=state, config={"lr": 3e-4}, layout={"tp": 2})
    manifest = open_checkpoint(path).manifest
    assert manifest.state == state
    assert list(manifest.state) == ["z", "a"]
    assert (manifest.step, manifest.config, manifest.layout) == (12, {"lr": 3e-4}, {"tp": 2})
    assert set(manifest.versions) == {"megalite", "torch", "python"}
    assert (tmp_path / "latest").read_text() == "step-00000012\n"


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {"a": {1: 2}}, {"a": object()}])
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: object) -> None:
    with pytest.raises(CheckpointError, match=r"state\.a"):
        save_whole(tmp_path, 1, {}, state=state)
    assert list(tmp_path.iterdir()) == []


def test_only_the_common_part_of_rectangles_is_written(tmp_path: Path) -> None:
    """Loading a shard leaves the memory beside it alone."""
    state = make_globals(seed=3)
    ok(save_globals(tmp_path, 1, state, Cut(2, 2)))
    found = find_latest(tmp_path)
    assert found is not None
    around = torch.full((20,), -5.0, dtype=torch.float64)
    spec = SPECS[1]
    piece = NamedPiece.of_shard("master", spec, 4, 2, around[4:15], start=3)
    load(found, [piece], whole_kinds=())
    wanted = state[f"master/{spec.name}"][10:15].reshape(-1)[3:14]
    assert torch.equal(around[4:15], wanted)
    assert torch.equal(around[:4], torch.full((4,), -5.0, dtype=torch.float64))
    assert torch.equal(around[15:], torch.full((5,), -5.0, dtype=torch.float64))


def peak_mib() -> float:
    """Most resident memory this process ever had."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.long
def test_neither_saving_nor_loading_makes_a_second_copy(tmp_path: Path) -> None:
    """State of 128 MiB: peak resident memory grows by chunks, at equal and at other cuts."""
    spec = ShardSpec("w", (8192, 2048), 1)

    def grows_little(tp: int, loads: bool) -> None:
        tensors = [torch.full((8192, 2048 // tp), 1.0) for _ in range(2)]
        pieces = [
            NamedPiece.of_shard(k, spec, tp, 0, t) for k, t in zip("ab", tensors, strict=True)
        ]
        before_mib = peak_mib()
        if loads:
            load(open_checkpoint(tmp_path / step_name(1)), pieces)
        else:
            save(tmp_path, 1, pieces, state={}, config="", layout={})
        assert peak_mib() - before_mib < 80

    assert in_child(lambda: grows_little(1, loads=False)) == 0
    assert in_child(lambda: grows_little(1, loads=True)) == 0
    assert in_child(lambda: grows_little(2, loads=True)) == 0
