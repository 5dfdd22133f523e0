"""Checks that this machine can train: versions, devices, communication, limits, room, packages.

Each check gives its finding and, unless that is ok, a remedy. It changes nothing and starts no
process group. Reading order: `examine`, then the checks in its order.
"""

from __future__ import annotations

import os
import platform
import re
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

from megalite import __version__
from megalite.checks.packages import install_command, is_installed
from megalite.run.hardware import find_device

Status = Literal["ok", "warning", "missing"]

_GIB = 2**30
_MIN_PYTHON, _MIN_TORCH = (3, 11), (2, 11)
_MIN_SHM_BYTES = _GIB
_MIN_DISK_BYTES = 10 * _GIB
_MIN_OPEN_FILES = 4096
_NAME_LOOKUP_S = 1.0

# package -> its purpose
_OPTIONAL = {
    "triton": "kernels on GPUs",
    "pyarrow": "parquet corpora",
    "matplotlib": "loss.png and schedule --png",
    "tensorboard": "log.tensorboard",
    "wandb": "log.wandb",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check: its name, its status, what it found, and the remedy unless ok.

    "missing" stops training here; a "warning" costs speed or a feature.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def examine(out: Path) -> list[Finding]:
    """All findings, in the order of display; `out` is the folder for run folders."""
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
    yield Finding("megalite", "ok", __version__)

    # Only missing packages are listed, and torch, whose version matters.
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
        new_enough = True  # a custom build with a version of another form
    cuda = torch.version.cuda
    return Finding(
        "torch",
        "ok" if new_enough else "missing",
        f"{found}, {f'CUDA {cuda}' if cuda else 'built for the CPU'}",
        f"needs {_as_text(_MIN_TORCH)} or newer: pip install -U 'torch>={_as_text(_MIN_TORCH)}'",
    )


def _apex() -> Finding:
    """Finding on apex: NVIDIA's has compiled modules, PyPI's package of that name is another."""
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
        found = f"{os.cpu_count()} CPU cores, no GPU"
        if not driver:
            yield Finding("devices", "ok", found)
            return
        if torch.version.cuda is None:
            remedy = "this torch is built for the CPU: install a CUDA build of it"
        else:
            remedy = "the driver does not work with this torch; compare `nvidia-smi` with CUDA"
        yield Finding("devices", "missing", f"{found} that works, though there is a driver", remedy)
        return

    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _kernels() -> Iterator[Finding]:
    """The values that `kernels.backend` and `kernels.attention` may have here; none is set."""
    import torch

    from megalite.kernels import BackendError, select
    from megalite.kernels.others.attention import NAMES, require_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # On a CPU plain torch is the usual choice, so only a GPU without Triton is worth a warning.
    status: Status = "ok"
    try:
        found = f"{select('triton', device).name} by kernels.backend=auto"
    except BackendError as error:
        reason = str(error).removeprefix("kernels.backend=triton cannot be used: ")
        found = f"plain torch by kernels.backend=auto: {reason}"
        status = "ok" if device.type == "cpu" else "warning"
    yield Finding("kernels", status, found, "plain torch is slower on a GPU")

    usable, refused = ["auto"], []
    for name in NAMES:
        try:
            require_attention(name, device)
            usable.append(name)
        except BackendError:
            refused.append(name)
    lacking = f"; not {', '.join(refused)} (a run that asks for one says why)" if refused else ""
    yield Finding("attention", "ok", f"kernels.attention may be {', '.join(usable)}{lacking}")


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
        "no hardware file of megalite names it, so MFU is n/a; write one from its data sheet, as "
        "`megalite configs hardware/h100` prints, and give it as log.hardware",
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
        found = _as_text(torch.cuda.nccl.version()) if nccl else "not in this torch"
        yield Finding("nccl", "ok" if nccl else "missing", found, "install a CUDA build of torch")
    yield _host_name()


def _host_name() -> Finding:
    """Finding on the address of this host's name, which gloo advertises to the other nodes."""
    name, address = socket.gethostname(), ""

    def look_up() -> None:
        nonlocal address
        try:
            address = socket.gethostbyname(name)
        except OSError:
            address = "nothing"

    # In a thread, as a resolver without an answer may take many seconds to give up.
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

    # `out` may not exist yet: its file system and rights are those of the nearest folder that does.
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
    for package, purpose in _OPTIONAL.items():
        found = _version(package) if is_installed(package) else None
        yield Finding(
            package,
            "ok" if found else "warning",
            found or f"not installed (for {purpose})",
            install_command(package),
        )


def _required_packages() -> list[str]:
    """Names of the packages that megalite's installation requires, without extras."""
    try:
        wanted = requires("megalite") or []
    except PackageNotFoundError:
        return ["torch"]
    # A requirement such as `torch>=2.11` starts with the package's name.
    return [re.split(r"[^\w.-]", line)[0] for line in wanted if "extra ==" not in line]


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
