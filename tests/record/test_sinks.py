"""Views of a run's record: names, a second attempt, and every way in which a view may fail."""

from __future__ import annotations

import importlib
import json
import shutil
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.checks.packages import is_installed, missing_extras, require_extras
from megalite.config import RunConfig, WandbConfig
from megalite.record.records import read_metrics
from megalite.record.sinks import Recorder
from megalite.record.tensorboard_sink import TensorBoardSink
from megalite.record.views import scalars
from megalite.record.wandb_sink import WandbSink, has_key, reachable, run_id

KEY = "0123456789abcdef0123456789abcdef01234567"


def config(**log: Any) -> RunConfig:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 8}
    return RunConfig.model_validate(
        {
            "model": {**sizes, "vocab_size": 16},
            "data": {"seq_length": 4},
            "train": {"steps": 4, "global_batch": 2},
            "log": log,
        }
    )


def step_record(step: int, loss: float) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "mfu": None,
        "step_time_s": 0.5,
        "time_compute_s": 0.25,
        "memory_peak_bytes": 1024,
        "grad_norms": {"layers.0": 2.0},
        "param_stats": {"layers.0.mlp.up.weight": {"rms": 0.5}},
    }


def write_two_attempts(folder: Path, run: RunConfig, warn: Any = print) -> None:
    """Steps 1-4, then a rollback to 2 and steps 3, 4 again."""
    for steps, start in ((range(1, 5), 0), (range(3, 5), 2)):
        recorder = Recorder(folder, run, warn)
        kind = "run" if recorder.attempt == 1 else "restart"
        recorder.write(kind, step=start, config=run.model_dump(mode="json"))
        for step in steps:
            recorder.write("step", **step_record(step, 10.0 * recorder.attempt + step))
        recorder.write("eval", step=4, name="validation", loss=1.5, tokens=64)
        recorder.write("checkpoint", step=4, path="x", seconds=0.1)
        recorder.close(0)


def test_names_of_scalars() -> None:
    line = {"kind": "step", "attempt": 1, **step_record(3, 2.5)}
    assert scalars(line) == {
        "train/loss": 2.5,
        "perf/step_time_s": 0.5,
        "perf/time_compute_s": 0.25,
        "memory/memory_peak_bytes": 1024,
        "train/grad_norms/layers.0": 2.0,
        "train/param_stats/layers.0.mlp.up.weight/rms": 0.5,
    }
    evaluation = {"kind": "eval", "attempt": 1, "step": 4, "name": "code", "loss": 1.0, "tokens": 9}
    assert scalars(evaluation) == {"eval/code/loss": 1.0, "eval/code/tokens": 9}
    assert scalars({"kind": "checkpoint", "step": 1, "seconds": 2.0}) == {}


def test_tensorboard_has_every_scalar_of_the_last_attempt(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_two_attempts(tmp_path, config(tensorboard=True))
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 11.0),
        (2, 12.0),
        (3, 23.0),
        (4, 24.0),
    ]
    assert set(events.Tags()["scalars"]) == {
        *scalars({"kind": "step", **step_record(1, 1.0)}),
        "eval/validation/loss",
        "eval/validation/tokens",
    }
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # a file for each attempt


def test_tensorboard_has_the_last_step_once_its_sink_is_closed(tmp_path: Path) -> None:
    """Its writer keeps events back for half a minute; nothing else writes them at the end."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write({"kind": "run", "step": 0, "config": {}})
    sink.write({"kind": "step", **step_record(1, 2.5)})
    sink.close(0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [2.5]


def wandb_records(path: Path) -> list[Any]:
    """The records of a .wandb file: a LevelDB log of protobuf messages behind 7 bytes."""
    # which module has the messages depends on protobuf's version, and is chosen at import
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's end is padded
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of several
            found.append(messages.Record.FromString(parts))
            parts = b""
    return found


@pytest.mark.long
def test_wandb_offline_has_the_steps_of_both_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", "hf_" + KEY)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    warnings: list[str] = []
    run = config(wandb={"project": "p", "mode": "offline", "timeout_s": 300})
    write_two_attempts(tmp_path / "run", run, warnings.append)
    assert warnings == []
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {path.stem for path in files} == {f"run-{run_id(tmp_path / 'run')}"}
    records = [record for path in files for record in wandb_records(path)]
    history = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.HasField("history")
    ]
    rows = [(h["attempt"], h["step"], h["train/loss"]) for h in history if "train/loss" in h]
    assert sorted(rows) == [
        *((1, step, 10.0 + step) for step in range(1, 5)),
        *((2, step, 20.0 + step) for step in range(3, 5)),
    ]
    metrics = [r.metric for r in records if r.HasField("metric")]
    assert ("*", "step") in {(m.glob_name, m.step_metric) for m in metrics}
    secret = KEY.encode()
    assert [
        p for p in (tmp_path / "run").rglob("*") if p.is_file() and secret in p.read_bytes()
    ] == []


class FakeWandb:
    """Stands in for the package; what it does on init and on log is given."""

    def __init__(self, on_init: Any = None, on_log: Any = None, key: str | None = KEY) -> None:
        self.on_init, self.on_log = on_init, on_log
        self.modes: list[str] = []
        self.logged: list[dict[str, Any]] = []
        self.finished: list[int] = []
        self.settings = SimpleNamespace(
            mode="online", base_url="http://127.0.0.1:1", api_key=key, identity_token_file=None
        )

    def setup(self) -> Any:
        return SimpleNamespace(settings=self.settings)

    def Settings(self, **values: Any) -> Any:
        return values

    def init(self, **options: Any) -> FakeWandb:
        self.modes.append(options["mode"])
        if self.on_init:
            self.on_init()
        return self

    def define_metric(self, *names: str, **options: Any) -> None: ...

    def log(self, line: dict[str, Any]) -> None:
        if self.on_log:
            self.on_log()
        self.logged.append(line)

    def teardown(self) -> None: ...

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)


def drive(fake: FakeWandb, folder: Path, steps: int = 3, **changes: Any) -> list[str]:
    """A run with the fake as its view; the warnings it led to."""
    warnings: list[str] = []
    chosen = WandbConfig(project="p", **{"timeout_s": 30.0, **changes})
    sink = WandbSink(chosen, folder, "name", warnings.append, fake)
    sink.write({"kind": "run", "attempt": 1, "step": 0, "config": {}})
    for step in range(1, steps + 1):
        sink.write({"kind": "step", "attempt": 1, **step_record(step, 1.0)})
    sink.close(75)
    return warnings


def test_without_a_key_or_a_network_the_run_is_offline(tmp_path: Path) -> None:
    fake = FakeWandb(key=None)
    fake.settings.base_url = "http://nowhere.invalid"
    (warning,) = drive(fake, tmp_path)
    assert warning.startswith("warning: wandb has no key (`wandb login`); this run is kept offline")
    assert (fake.modes, len(fake.logged), fake.finished) == (["offline"], 3, [75])
    fake = FakeWandb()
    (warning,) = drive(fake, tmp_path, mode="online")
    assert warning.startswith("warning: wandb at http://127.0.0.1:1 cannot be reached; this run is")
    assert (fake.modes, len(fake.logged)) == (["offline"], 3)
    fake.settings.mode = "disabled"
    assert drive(fake, tmp_path) == []
    assert fake.modes[1:] == ["disabled"]


def test_a_copied_run_folder_is_a_wandb_run_of_its_own(tmp_path: Path) -> None:
    first = tmp_path / "a"
    first.mkdir()
    known = run_id(first)
    assert run_id(first) == known
    copy = tmp_path / "b"
    shutil.copytree(first, copy)
    other = run_id(copy)
    assert other != known
    assert (run_id(first), run_id(copy)) == (known, other)
    (tmp_path / "link").symlink_to(first)
    assert run_id(tmp_path / "link") == known


def test_an_id_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    (tmp_path / "wandb_id").write_text("0123456789ab\n")
    assert run_id(tmp_path) == "0123456789ab"
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert run_id(tmp_path / "copy") != "0123456789ab"


def test_with_a_key_and_a_network_the_run_is_online(tmp_path: Path) -> None:
    fake = FakeWandb()
    with socket.create_server(("127.0.0.1", 0)) as server:
        fake.settings.base_url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert reachable(fake.settings.base_url)
        assert drive(fake, tmp_path) == []
    assert fake.modes == ["online"]
    assert not reachable("http://127.0.0.1:1")


def test_a_service_that_refuses_the_run_leaves_it_offline(tmp_path: Path) -> None:
    fake = FakeWandb()

    def refuse_online() -> None:
        if fake.modes[-1] == "online":
            raise RuntimeError("no such entity")

    fake.on_init = refuse_online
    with socket.create_server(("127.0.0.1", 0)) as server:
        fake.settings.base_url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (warning,) = drive(fake, tmp_path)
    assert "did not take the run (RuntimeError: no such entity); this run is kept off" in warning
    assert (fake.modes, len(fake.logged), fake.finished) == (["online", "offline"], 3, [75])


@pytest.mark.long
@pytest.mark.parametrize("where", ["init", "log", "finish", "teardown"])
def test_a_service_that_hangs_is_given_up_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    never = threading.Event()
    fake = FakeWandb()
    monkeypatch.setattr(fake, where, lambda *line, **options: never.wait())
    warnings: list[str] = []
    chosen = WandbConfig(project="p", mode="offline", timeout_s=1.0)
    sink = WandbSink(chosen, tmp_path, "name", warnings.append, fake)
    sink.write({"kind": "run", "attempt": 1, "step": 0, "config": {}})
    sink.write({"kind": "step", "attempt": 1, **step_record(1, 1.0)})  # does not wait
    sink.close(0)
    sink.write({"kind": "step", "attempt": 1, **step_record(2, 1.0)})
    sink.close(0)
    assert warnings == [
        "warning: wandb did not finish in time and is left out; metrics.jsonl has every line"
    ]
    never.set()


def fail() -> None:
    raise RuntimeError("no such project")


@pytest.mark.parametrize("where", ["on_init", "on_log"])
def test_an_error_of_the_library_is_one_warning(tmp_path: Path, where: str) -> None:
    hooks: dict[str, Any] = {where: fail}
    fake = FakeWandb(**hooks)
    assert drive(fake, tmp_path, mode="offline") == [
        "warning: wandb failed (RuntimeError: no such project) and is left out; "
        "metrics.jsonl has every line"
    ]


def test_a_view_that_fails_leaves_the_record_whole(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    warnings: list[str] = []
    write_two_attempts(tmp_path, config(tensorboard=True), warnings.append)
    assert len(warnings) == 2  # one for each attempt
    assert all(w.startswith("warning: TensorBoard failed (FileExistsError: ") for w in warnings)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 12


def test_a_missing_package_is_named_with_its_remedy() -> None:
    both = config(tensorboard=True, wandb={"project": "p"})
    assert missing_extras(both, found=lambda package: False) == [
        "log.tensorboard=true needs the package tensorboard, which is not installed; install it "
        "with `pip install 'megalite[tensorboard]'`, or remove the setting",
        "log.wandb.project=p needs the package wandb, which is not installed; install it with "
        "`pip install 'megalite[wandb]'`, or remove the setting",
    ]
    assert missing_extras(config(), found=lambda package: False) == []
    require_extras(both)


def test_a_folder_of_that_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_view").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("a_view")
    assert not is_installed("no.such.package")


def test_a_key_in_netrc_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(api_key=None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_key(settings, "https://api.example.org")
    (tmp_path / ".netrc").write_text(f"machine api.example.org login user password {KEY}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert has_key(settings, "https://api.example.org")
    assert not has_key(settings, "https://other.example.org")
