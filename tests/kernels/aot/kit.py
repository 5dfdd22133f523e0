"""Compile what a launcher launches, for a GPU that is not there, and read its machine code.

The launchers run as in production on CPU tensors whose values are never touched; each launch is
specialised and compiled as Triton would (divisibility by 16, descriptors, constants), then recorded
instead of started.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class AbsentGpu:
    """What the JIT asks of a driver before a launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Recorder:
    """The kernels of the launches in a `recording`, in order."""

    kernels: list[Any] = field(default_factory=list)


@contextmanager
def recording(capability: int) -> Iterator[Recorder]:
    """Compile for sm_`capability` instead of launching."""
    recorder = Recorder()
    run = JITFunction.run

    def compile_only(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        options["warmup"] = True
        kernel = run(self, *arguments, **options)
        recorder.kernels.append(kernel)
        return kernel

    driver.set_active(AbsentGpu(capability))
    JITFunction.run = compile_only
    try:
        yield recorder
    finally:
        JITFunction.run = run


def _dump(cubin: bytes, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), *arguments, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def _count(sass: str, pattern: str) -> int:
    return len(re.findall(pattern, sass))


def describe(kernel: Any) -> dict[str, Any]:
    """Registers, spills, shared memory, matrix instructions and access widths of a kernel."""
    cubin = kernel.asm["cubin"]
    usage = _dump(cubin, "--dump-resource-usage")
    sass = _dump(cubin, "-sass")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    narrow = r"\b(?:LDG|STG)\.E(?:\.[A-Z_]+)*(?:\.(?:U8|S8|U16|S16))?(?!\.?(?:64|128))\b"
    return {
        "warps": kernel.metadata.num_warps,
        "registers": int(found[1]),
        "spills": _count(sass, r"\b(?:LDL|STL)\b"),
        "stack_bytes": int(found[2]),
        "shared_bytes": kernel.metadata.shared,
        "instructions": _count(sass, r"/\*[0-9a-f]{4,}\*/ "),
        "hgmma": _count(sass, r"\bHGMMA\."),
        "hmma": _count(sass, r"\bHMMA\."),
        "wide_loads": _count(sass, r"\bLDG(?:STS)?\.E(?:\.[A-Z_]+)*\.128\b"),
        "wide_stores": _count(sass, r"\bSTG\.E(?:\.[A-Z_]+)*\.128\b"),
        "tma_loads": _count(sass, r"\bUTMALDG\b"),
        "narrow": _count(sass, narrow),
    }
