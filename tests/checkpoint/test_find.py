"""Which checkpoint is chosen, which are refused, and that nothing in one is ever executed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.find import find_checkpoint, find_latest, open_checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.names import MANIFEST, is_checkpoint, list_steps, step_name
from megalite.checkpoint.pieces import NamedPiece
from megalite.distributed.agree import Ranks
from megalite.errors import CheckpointError, ConfigError
from tests.checkpoint.kit import (
    Cut,
    check_loads,
    make_globals,
    ok,
    rewrite,
    run_ranks,
    save_globals,
    save_whole,
)

SHARD = "rank-00000.safetensors"


def save_steps(root: Path, *steps: int) -> None:
    for step in steps:
        save_whole(root, step, {"w": torch.full((3,), float(step))})


def found_step(root: Path) -> int:
    found = find_latest(root)
    assert found is not None
    return found.manifest.step


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_order_is_by_number_not_by_text(tmp_path: Path) -> None:
    save_steps(tmp_path, 8, 100, 9, 10, 123456789, 99999999)
    assert [s for s, _ in list_steps(tmp_path)] == [8, 9, 10, 100, 99999999, 123456789]
    assert found_step(tmp_path) == 123456789


def test_the_pointer_is_only_advice(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for pointer in ["step-00000001", "../../etc", ""]:
        (tmp_path / "latest").write_text(pointer)
        assert found_step(tmp_path) == 2


def test_what_is_not_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    for name in [".tmp-step-00000009-ab", ".trash-step-00000009", "step-9", "step-00000009.bak"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000010").write_text("a file")
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.manifest.step, found.skipped) == (3, ())


def test_leftovers_are_cleaned_by_the_next_save(tmp_path: Path) -> None:
    for name in [".tmp-step-00000009-ab", ".trash-step-00000009"]:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    save_steps(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize("root", ["", "never/made"])
def test_nothing_there_is_none(tmp_path: Path, root: str) -> None:
    assert find_latest(tmp_path / root) is None


def test_any_flipped_byte_is_noticed_and_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for name in [SHARD, MANIFEST]:
        path = tmp_path / step_name(2) / name
        for position in range(0, path.stat().st_size, 3):
            flip(path, position)
            found = find_latest(tmp_path)
            assert found is not None
            assert found.manifest.step == 1, (name, position)
            assert len(found.skipped) == 1
            assert str(path) in found.skipped[0]
            flip(path, position)
    assert found_step(tmp_path) == 2


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_any_truncation_is_noticed_and_named(tmp_path: Path, name: str) -> None:
    save_steps(tmp_path, 1, 2)
    path = tmp_path / step_name(2) / name
    intact = path.read_bytes()
    for size in [0, 1, len(intact) // 2, len(intact) - 3]:
        path.write_bytes(intact[:size])
        found = find_latest(tmp_path, verify="size")
        assert found is not None
        assert found.manifest.step == 1
        assert str(path) in found.skipped[0]
    path.unlink()
    assert found_step(tmp_path) == 1


def test_all_bad_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in [1, 2]:
        flip(tmp_path / step_name(step) / SHARD, -1)
    with pytest.raises(CheckpointError) as caught:
        find_latest(tmp_path)
    for step in [1, 2]:
        assert str(tmp_path / step_name(step) / SHARD) in str(caught.value)


def test_a_bad_one_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    flip(tmp_path / step_name(2) / SHARD, -1)
    save_steps(tmp_path, 2)
    assert found_step(tmp_path) == 2


def test_ranks_share_the_hashing_and_agree(tmp_path: Path) -> None:
    """The damaged file falls to one rank of three; all of them fall back."""
    state = make_globals(seed=4)
    for step in [1, 2]:
        ok(save_globals(tmp_path, step, state, Cut(1, 4)))
    flip(tmp_path / step_name(2) / "rank-00001.safetensors", -1)

    def work(ranks: Ranks) -> tuple[int, tuple[str, ...]]:
        found = find_latest(tmp_path, ranks)
        assert found is not None
        return found.manifest.step, found.skipped

    answers = ok(run_ranks(3, work))
    assert len(set(answers)) == 1
    step, skipped = answers[0]
    assert step == 1
    assert "rank 1: " in skipped[0]
    assert "rank-00001.safetensors is damaged" in skipped[0]
    check_loads(tmp_path, 1, state, Cut(1, 3))


def test_a_missing_checkpoint_is_an_error_that_lists_what_exists(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 9)
    with pytest.raises(CheckpointError, match="step-00000009, step-00000010"):
        open_checkpoint(tmp_path / step_name(11))
    with pytest.raises(CheckpointError, match=r"folder of checkpoints.*step-00000010"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path / "other" / step_name(1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        open_checkpoint(tmp_path / "empty")


def test_whatever_leads_to_a_checkpoint_is_found(tmp_path: Path) -> None:
    run, folder = tmp_path / "latest", tmp_path / "latest" / "checkpoints"
    save_steps(folder, 3, 20)
    assert is_checkpoint(folder / step_name(3))
    for path in (run, folder, folder / "latest"):
        assert not is_checkpoint(path)
        assert find_checkpoint(path).path == folder / step_name(20)
        assert find_checkpoint(path, step=3).path == folder / step_name(3)
        with pytest.raises(CheckpointError, match="step-00000007 does not exist; there are"):
            find_checkpoint(path, step=7)
    (folder / step_name(3)).rename(tmp_path / "best")
    assert find_checkpoint(tmp_path / "best").manifest.step == 3
    with pytest.raises(ConfigError, match="which is a checkpoint itself"):
        find_checkpoint(tmp_path / "best", step=3)
    file = folder / step_name(20) / "manifest.json"
    cases = {tmp_path: "holds no checkpoint", tmp_path / "gone": "does not exist"}
    for path, text in {**cases, file: "is no folder"}.items():
        with pytest.raises(CheckpointError, match=f"{text}; give a checkpoint"):
            find_checkpoint(path)


def test_a_directory_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / step_name(1)).rename(tmp_path / step_name(5))
    with pytest.raises(CheckpointError, match="holds step 1"):
        open_checkpoint(tmp_path / step_name(5))
    (tmp_path / step_name(5)).rename(tmp_path / "best")
    assert open_checkpoint(tmp_path / "best").manifest.step == 1


def test_wrong_missing_and_unused_tensors_are_named_before_anything_is_written(
    tmp_path: Path,
) -> None:
    values = {"param/a": torch.ones(4, 3), "param/b": torch.ones(2), "exp_avg/a": torch.ones(4, 3)}
    found = open_checkpoint(save_whole(tmp_path, 1, values))
    good = NamedPiece.whole("param/a", torch.zeros(4, 3))
    for wrong, message in [
        (NamedPiece.whole("param/c", torch.zeros(2)), "param/c is not in"),
        (NamedPiece.whole("param/b", torch.zeros(3)), r"param/b has shape \(2,\).*\(3,\)"),
        (NamedPiece.whole("param/b", torch.zeros(2, 1)), "param/b has shape"),
        (NamedPiece.whole("param/b", torch.zeros(2).bfloat16()), "param/b is float32.*bfloat16"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load(found, [good, wrong], whole_kinds=())
    with pytest.raises(CheckpointError, match="no place for: exp_avg/a, param/b"):
        load(found, [good])
    assert not good.data.any()
    load(found, [good], whole_kinds=())
    assert good.data.all()


def test_a_tensor_that_another_rank_loads_is_not_unused(tmp_path: Path) -> None:
    path = save_whole(tmp_path, 1, {"a": torch.ones(1), "b": torch.ones(1)})

    def work(ranks: Ranks) -> None:
        names = "ab" if len(names_of) > 1 else "a"
        piece = NamedPiece.whole(names[ranks.rank % len(names)], torch.zeros(1))
        load(open_checkpoint(path, ranks), [piece], ranks)
        assert piece.data.all()

    names_of = ["a", "b"]
    ok(run_ranks(2, work))
    names_of.pop()
    errors = run_ranks(2, work)
    assert all("no place for: b" in str(e) for e in errors)


def set_file(name: str) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        body["files"][name] = body["files"].pop(SHARD)
        body["tensors"]["w"]["rectangles"][0]["file"] = name

    return change


def set_box(**change: Any) -> Callable[[Any], None]:
    return lambda body: body["tensors"]["w"]["rectangles"][0].update(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_file("../step-00000001/rank-00000.safetensors"), "not a plain name"),
        (set_file("/etc/passwd.safetensors"), "not a plain name"),
        (set_file("..safetensors"), "not a plain name"),
        (set_file("a.safetensors/../../b.safetensors"), "not a plain name"),
        (set_file("a.safetensors/../../b"), "not a plain name"),
        (set_file("a\n.safetensors"), "not a plain name"),
        (set_file("rank-00000.pkl"), "not a plain name"),
        (set_box(file="other.safetensors"), "is not listed"),
        (set_box(offsets=[1]), "outside"),
        (set_box(offsets=[-1]), "greater than or equal to 0"),
        (set_box(sizes=[2]), "2 of 3"),
        (set_box(sizes=[1.5]), "valid integer"),
        (set_box(offsets=[0, 0], sizes=[3, 1]), "not a rectangle"),
        (lambda b: b["tensors"]["w"].update(dtype="object"), "unknown dtype"),
        (
            lambda b: b["tensors"]["w"]["rectangles"].append(b["tensors"]["w"]["rectangles"][0]),
            "overlap",
        ),
        (lambda b: b.update(extra=1), "extra"),
        (lambda b: b.pop("state"), "state"),
        (lambda b: b.update(version=2), "format version 2; this megalite reads 1"),
        (lambda b: b.update(step="1"), "step"),
        (lambda b: b["files"][SHARD].update(sha256="x"), "sha256"),
    ],
)
def test_a_manifest_that_does_not_fit_together_is_refused(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    save_steps(tmp_path, 1)
    path = tmp_path / step_name(1)
    rewrite(path, lambda body: None)
    open_checkpoint(path)
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path / MANIFEST) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b"9" * 9999, b'{"sha256":1}'],
)
def test_a_manifest_of_rubbish_is_refused(tmp_path: Path, content: bytes) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / step_name(1) / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_checkpoint(tmp_path / step_name(1))


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    shard = tmp_path / step_name(1) / SHARD
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out"):
        open_checkpoint(tmp_path / step_name(1))


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", [SHARD, MANIFEST, "latest"])
@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_planted_pickle_never_runs(
    tmp_path: Path, name: str, protocol: int, zipped: bool
) -> None:
    save_steps(tmp_path, 1)
    path = tmp_path / step_name(1)
    marker, planted = tmp_path / "ran", (tmp_path if name == "latest" else path) / name
    if zipped:
        torch.save(Payload(marker), planted, pickle_protocol=max(2, protocol))
        torch.load(BytesIO(planted.read_bytes()), weights_only=False)
    else:
        planted.write_bytes(pickle.dumps(Payload(marker), protocol))
        pickle.loads(planted.read_bytes())
    marker.unlink()  # the payload works; from here on nothing may run it

    if name == SHARD:
        data = planted.read_bytes()
        entry = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        rewrite(path, lambda body: body["files"].update({SHARD: entry}))
    target = NamedPiece.whole("w", torch.zeros(3))
    if name == "latest":
        load(open_checkpoint(path), [target])
        save_steps(tmp_path, 2)
    else:
        with pytest.raises(CheckpointError, match=name):
            load(open_checkpoint(path), [target])
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_somebody_elses_latest_does_not_fail_a_save(tmp_path: Path, kind: str) -> None:
    latest, other = tmp_path / "latest", tmp_path / "step-00000001"
    save_steps(tmp_path, 1)
    latest.unlink()
    if kind == "directory":
        latest.mkdir()
        (latest / "mine").write_text("kept")
    else:
        latest.symlink_to(other.name)
    save_steps(tmp_path, 2)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.path.name == "step-00000002"
    assert sorted(path.name for path in other.iterdir()) == sorted(
        path.name for path in found.path.iterdir()
    )
    if kind == "directory":
        assert (latest / "mine").read_text() == "kept"
    else:
        assert latest.read_text() == "step-00000002\n"
        assert not latest.is_symlink()
    assert not list(tmp_path.glob(".tmp-*"))
