"""Is this machine ready to train? Versions, devices, communication, limits, room, packages.

Each check says what it found and, where that is not right, what to do. It changes nothing and
starts no process group. Reading order: `examine`, then the checks in its order.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from megalite.checks.packages import is_installed
from megalite.run.hardware import find_device

Status = Literal["ok", "warning", "missing"]

_GIB = 2**30
_MIN_PYTHON, _MIN_TORCH = (3, 11), (2, 11)
_MIN_SHM_BYTES = _GIB
_MIN_DISK_BYTES = 10 * _GIB
_MIN_OPEN_FILES = 4096
_NAME_LOOKUP_S = 1.0

# package -> (what it is for, how to get it)
_OPTIONAL = {
    "triton": ("kernels on GPUs", "pip install 'megalite[triton]'"),
    "pyarrow": ("parquet corpora", "pip install 'megalite[corpora]'"),
    "tensorboard": ("log.tensorboard", "pip install 'megalite[tensorboard]'"),
    "wandb": ("log.wandb", "pip install 'megalite[wandb]'"),
}


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, what was found, and what to do unless it is ok.

    "missing" stops training here; a "warning" costs speed or a feature.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def examine(out: Path) -> list[Finding]:
    """All findings, in the order to show them; `out` is the folder that run folders go to."""
    findings = [
        *_software(),
        *_devices(),
        *_kernels(),
        *_communication(),
        *_limits(),
        *_room(out),
        *_packages(),
    ]
    return [replace(f, remedy="") if f.status == "ok" else f for f in findings]


def exit_code(findings: list[Finding]) -> int:
    """0 if training can start here, else 1."""
    return int(any(finding.status == "missing" for finding in findings))


def _software() -> Iterator[Finding]:
    python = sys.version_info[:2]
    yield Finding(
        "python",
        "ok" if python >= _MIN_PYTHON else "missing",
        f"{platform.python_version()} ({sys.executable})",
        f"needs {_as_text(_MIN_PYTHON)} or newer",
    )
    yield Finding("megalite", "ok", _version("megalite") or "not installed as a package")
    for package in _required_packages():
        found = _version(package)
        if package == "torch" and found is not None:
            yield _torch(found)
        elif found is None:
            yield Finding(package, "missing", "not installed", f"pip install {package}")
    yield _apex()


def _torch(found: str) -> Finding:
    import torch

    try:
        new_enough = tuple(int(part) for part in found.split("+")[0].split(".")[:2]) >= _MIN_TORCH
    except ValueError:
        new_enough = True  # a version of someone's own making
    cuda = torch.version.cuda
    return Finding(
        "torch",
        "ok" if new_enough else "missing",
        f"{found}, {f'CUDA {cuda}' if cuda else 'built for the CPU'}",
        f"needs {_as_text(_MIN_TORCH)} or newer: pip install -U 'torch>={_as_text(_MIN_TORCH)}'",
    )


def _apex() -> Finding:
    """NVIDIA's apex has compiled modules; a web toolkit of that name is what PyPI has."""
    if not is_installed("apex"):
        return Finding("apex", "ok", "not installed; megalite's own kernels are used")
    if is_installed("amp_C"):
        return Finding("apex", "ok", f"NVIDIA's ({_version('apex') or 'no version'})")
    return Finding(
        "apex",
        "warning",
        f"not NVIDIA's (version {_version('apex') or 'unknown'}, no module amp_C): PyPI's package "
        "of that name is a web toolkit, or apex was built without its extensions",
        "pip uninstall apex; NVIDIA's comes with NGC images or is built from its repository",
    )


def _devices() -> Iterator[Finding]:
    import torch

    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    if not torch.cuda.is_available():
        remedy = ""
        if driver and torch.version.cuda is None:
            remedy = "this torch is built for the CPU: install a CUDA build of it"
        elif driver:
            remedy = "the driver does not work with this torch; compare `nvidia-smi` with CUDA"
        yield Finding(
            "devices",
            "missing" if driver else "ok",
            f"{os.cpu_count()} CPU cores, no GPU"
            + (" that works, though there is a driver" * driver),
            remedy,
        )
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _kernels() -> Iterator[Finding]:
    """What `kernels.backend` and `kernels.attention` may be here; nothing is taken into use."""
    import torch

    from megalite.kernels import BackendError, select
    from megalite.kernels.others.attention import NAMES, require_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found, good = f"{select('triton', device).name} by kernels.backend=auto", True
    except BackendError as error:
        reason = str(error).removeprefix("kernels.backend=triton cannot be used: ")
        found, good = f"plain torch by kernels.backend=auto: {reason}", device.type == "cpu"
    yield Finding("kernels", "ok" if good else "warning", found, "plain torch is slower on a GPU")
    there, absent = ["auto"], []
    for name in NAMES:
        try:
            require_attention(name, device)
            there.append(name)
        except BackendError:
            absent.append(name)
    lacking = f"; not {', '.join(absent)} (a run that asks for one says why)" if absent else ""
    yield Finding("attention", "ok", f"kernels.attention may be {', '.join(there)}{lacking}")


def _gpu(index: int) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    preset = find_device(properties.name)
    peak = preset.peak_tflops.get("bfloat16") if preset else None
    return Finding(
        f"gpu {index}",
        "ok" if peak else "warning",
        f"{properties.name}, {properties.total_memory / _GIB:.1f} GiB, compute capability "
        f"{properties.major}.{properties.minor}, peak {f'{peak:g} TFLOP/s' if peak else 'n/a'}",
        "no file of configs/hardware names it, so MFU is n/a; write one from its data sheet and "
        "give it as log.hardware",
    )


def _communication() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        "gloo", "ok" if gloo else "missing", "there" if gloo else "not in this torch",
        "install a torch with torch.distributed and gloo",
    )  # fmt: skip
    if torch.cuda.is_available():
        nccl = dist.is_available() and dist.is_nccl_available()
        found = _nccl_version() if nccl else "not in this torch"
        yield Finding("nccl", "ok" if nccl else "missing", found, "install a CUDA build of torch")
    yield _host_name()


def _nccl_version() -> str:
    import torch

    numbers: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return _as_text(numbers)


def _host_name() -> Finding:
    """Where other nodes would look for this one: gloo asks the resolver, which may not know."""
    name, address = socket.gethostname(), ""

    def look_up() -> None:
        nonlocal address
        try:
            address = socket.gethostbyname(name)
        except OSError:
            address = "nothing"

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_NAME_LOOKUP_S)
    address = address or f"nothing within {_NAME_LOOKUP_S:g} s"
    usable = address[0].isdigit() and not address.startswith("127.")
    return Finding(
        "host name",
        "ok" if usable else "warning",
        f"{name} resolves to {address}",
        "across nodes gloo needs GLOO_SOCKET_IFNAME set to the interface that joins them",
    )


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(
        "open files",
        "ok" if _is_unlimited(files) or files >= _MIN_OPEN_FILES else "warning",
        _limit_text(files),
        "raise it: ulimit -n 65536 (in a container: --ulimit nofile=65536:65536)",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fabric = Path("/sys/class/infiniband").is_dir()
    enough = _is_unlimited(locked) or not fabric
    yield Finding(
        "locked memory",
        "ok" if enough else "warning",
        _limit_text(locked, "bytes") + ("" if fabric else "; no InfiniBand here needs it"),
        "InfiniBand needs it: ulimit -l unlimited (in a container: --ulimit memlock=-1)",
    )


def _room(out: Path) -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        yield Finding(
            "/dev/shm",
            "ok" if size >= _MIN_SHM_BYTES else "warning",
            f"{size / _GIB:.2f} GiB",
            "NCCL and readers share memory there: --shm-size=8g or --ipc=host for a container",
        )
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    yield Finding(
        "disk of out",
        "ok" if free >= _MIN_DISK_BYTES else "warning",
        f"{free / _GIB:.1f} GiB free at {place}",
        "a checkpoint takes 12 bytes a parameter (bf16, AdamW); give another --out",
    )
    writable = place.is_dir() and os.access(place, os.W_OK)
    yield Finding(
        "run folders",
        "ok" if writable else "missing",
        f"{out} {'can' if writable else 'cannot'} be written",
        "give a folder of your own: --out, or `out` in the config",
    )


def _packages() -> Iterator[Finding]:
    for package, (purpose, remedy) in _OPTIONAL.items():
        found = _version(package) if is_installed(package) else None
        yield Finding(
            package,
            "ok" if found else "warning",
            found or f"not installed (for {purpose})",
            remedy,
        )


def _required_packages() -> list[str]:
    """Names of what megalite's installation depends on, without extras."""
    try:
        wanted = requires("megalite") or []
    except PackageNotFoundError:
        return ["torch"]
    plain = [line for line in wanted if "extra ==" not in line]
    return [_name_of(line) for line in plain]


def _name_of(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "._-")), None)
    return requirement[:end]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _as_text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _is_unlimited(limit: int) -> bool:
    return limit == resource.RLIM_INFINITY


def _limit_text(limit: int, unit: str = "") -> str:
    return "unlimited" if _is_unlimited(limit) else f"{limit:,} {unit}".strip()
