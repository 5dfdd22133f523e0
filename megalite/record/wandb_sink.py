"""The view of a run in Weights & Biases, in a thread of its own: training never waits for it.

The thread checks that the service can be reached, starts the run, sends lines, and finishes it.
Without a key, a network or an answer in time the run is kept offline or left out, with one warning;
metrics.jsonl has everything. The run's id is kept in the run folder (`wandb_id`), so a later
attempt continues the same run. Steps are a metric of their own (`step`), not wandb's counter, which
drops values at or below its last one: after a rollback both attempts are there, distinguished by
`attempt`. wandb itself looks for its key; the code here checks that there is one, and stores none.
"""

from __future__ import annotations

import importlib
import netrc
import queue
import socket
import threading
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megalite.config import WandbConfig
from megalite.record.views import Warn, scalars

_PROBE_S = 5.0  # to open a connection
_MAX_WAITING = 100_000  # lines in the queue; they wait while the run starts
_PORTS = {"http": 80, "https": 443}


class WandbSink:
    """Sends lines to a wandb run. `module` stands in for the package in tests."""

    name = "wandb"

    def __init__(
        self, config: WandbConfig, folder: Path, run_name: str, warn: Warn, module: Any = None
    ) -> None:
        self._config, self._folder, self._run_name = config, folder, run_name
        self._warn, self._module = warn, module
        # Lines to send; a number is the exit code, after which the thread ends.
        self._lines: queue.Queue[dict[str, Any] | int] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._given_up = threading.Event()
        self._deadline_s = 0.0

    def write(self, record: dict[str, Any]) -> None:
        """Queue a line; the first one, which has the config, starts the thread. Never waits."""
        if self._thread is None:
            # Time for a start online that fails, and for one offline.
            self._deadline_s = time.monotonic() + 2 * self._config.timeout_s
            self._thread = threading.Thread(
                target=self._work, args=(record.get("config", {}),), name="wandb", daemon=True
            )
            self._thread.start()
        if not self._started.is_set() and time.monotonic() > self._deadline_s:
            self._give_up("did not start in time")
        numbers = scalars(record)
        if numbers and not self._given_up.is_set():
            line = {"step": record["step"], "attempt": record["attempt"], **numbers}
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self._give_up("takes lines more slowly than the run writes them")

    def close(self, exit_code: int) -> None:
        """Finish the run; waits for `timeout_s`, or until the start's deadline if that is later."""
        if self._thread is None or self._given_up.is_set():
            return
        self._lines.put(exit_code, timeout=self._config.timeout_s)
        self._thread.join(max(self._config.timeout_s, self._deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._give_up("did not finish in time")

    def _give_up(self, reason: str) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            self._warn(f"warning: wandb {reason} and is left out; metrics.jsonl has every line")

    def _work(self, config: dict[str, Any]) -> None:
        try:
            run = self._start(config)
            self._started.set()
            while not self._given_up.is_set():
                line = self._lines.get()
                if isinstance(line, int):
                    run.finish(exit_code=line)
                    self._wandb().teardown()  # its service process, too
                    return
                run.log(line)
        except Exception as error:  # whatever wandb raises: a view must not end the run
            self._give_up(f"failed ({type(error).__name__}: {error})")

    def _wandb(self) -> Any:
        return self._module or importlib.import_module("wandb")

    def _start(self, config: dict[str, Any]) -> Any:
        mode = self._mode(self._wandb().setup().settings)
        try:
            run = self._init(config, mode)
        except Exception as error:
            if mode != "online" or self._given_up.is_set():
                raise
            self._keep_offline(f"did not take the run ({type(error).__name__}: {error})")
            self._wandb().teardown()  # its service still holds the id
            run = self._init(config, "offline")
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _init(self, config: dict[str, Any], mode: str) -> Any:
        wandb, chosen = self._wandb(), self._config
        # Nothing of the host's code or repository is sent: its address may contain a token.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            init_timeout=chosen.timeout_s,
        )
        return wandb.init(
            project=chosen.project,
            entity=chosen.entity,
            group=chosen.group,
            tags=list(chosen.tags),
            name=self._run_name,
            id=run_id(self._folder),
            resume="allow",
            dir=str(self._folder),
            mode=mode,
            config=config,
            allow_val_change=True,
            settings=settings,
        )

    def _keep_offline(self, reason: str) -> None:
        self._warn(
            f"warning: wandb {reason}; this run is kept offline in {self._folder / 'wandb'} (send "
            "it later with `wandb sync`)"
        )

    def _mode(self, settings: Any) -> str:
        """The mode of the run: "online", "offline" or "disabled".

        "offline" by the config always holds; "auto" follows wandb's own settings where they are
        "offline" or "disabled". Otherwise "online" if there is a key and the service is reachable,
        else "offline".
        """
        asked = self._config.mode
        if asked == "offline":
            return "offline"
        own = str(getattr(settings, "mode", "online"))
        if asked == "auto" and own in ("offline", "disabled"):
            return own
        url = str(settings.base_url)
        if not has_key(settings, url):
            self._keep_offline("has no key (`wandb login`)")
            return "offline"
        if not reachable(url):
            self._keep_offline(f"at {url} cannot be reached")
            return "offline"
        return "online"


def run_id(folder: Path) -> str:
    """The wandb id of a run folder, made on first use.

    A copy of a run folder is another run, so the file says, in its second line, which folder the id
    is for; an id of an earlier version, without that line, is the folder's own.
    """
    path, own = folder / "wandb_id", str(folder.resolve())
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found, *owner = text.splitlines() or [uuid.uuid4().hex[:12]]
    if owner and owner[0] != own:
        found = uuid.uuid4().hex[:12]
    path.write_text(f"{found}\n{own}\n", encoding="utf-8")
    return found


def has_key(settings: Any, url: str) -> bool:
    """True if wandb would find a key without asking a person."""
    if getattr(settings, "api_key", None) or getattr(settings, "identity_token_file", None):
        return True
    try:
        return netrc.netrc().authenticators(urlsplit(url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def reachable(url: str, timeout_s: float = _PROBE_S) -> bool:
    """True if a connection to the service, or to the proxy in front of it, can be opened."""
    scheme = urlsplit(url).scheme
    target = urlsplit(urllib.request.getproxies().get(scheme, url))
    port = target.port or _PORTS.get(target.scheme, 443)
    try:
        with socket.create_connection((target.hostname or "", port), timeout=timeout_s):
            return True
    except OSError:
        return False
