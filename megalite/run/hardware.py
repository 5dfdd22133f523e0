"""Data sheet figures of GPUs and their links: presets in configs/hardware/*.toml, by device name.

A device that no preset names is unknown: the answer is None, never that of a similar device. Rates
that a kernel or a fabric reaches in practice are not kept here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from megalite.config import Section
from megalite.config.explain import explain
from megalite.config.load import read_toml
from megalite.config.shipped import shipped_configs
from megalite.errors import ConfigError

PeakFormat = Literal["float16", "bfloat16", "tf32", "float32", "float64"]


class Hardware(Section):
    """One kind of GPU in its usual node. Bandwidths are per GPU and direction, 1 GB = 1e9 bytes."""

    name: str
    device_names: list[str]  # as torch.cuda.get_device_name reports them; compared whole
    # number format -> dense matrix TFLOP/s; one left out is unknown
    peak_tflops: dict[PeakFormat, Annotated[float, Field(gt=0)]]
    memory_gib: float = Field(gt=0)  # what CUDA reports as total, less than the nominal size
    memory_gb_per_s: float = Field(gt=0)
    nvlink_gb_per_s: float = Field(gt=0)
    network_gb_per_s: float = Field(gt=0)  # between nodes
    gpus_per_node: int = Field(ge=1)


def load_hardware(path: str | Path) -> Hardware:
    """Read one hardware file; raises ConfigError with every problem in it."""
    tree = read_toml(Path(path), "hardware file")
    try:
        return Hardware.model_validate(tree)
    except ValidationError as error:
        origins = {name: str(path) for name in tree}
        raise ConfigError([f"{path}: {line}" for line in explain(error, origins, set())]) from None


@cache
def presets() -> dict[str, Hardware]:
    """File name without .toml -> Hardware, for every preset that comes with megalite."""
    found = [one.path for one in shipped_configs().values() if one.kind == "hardware"]
    return {path.stem: load_hardware(path) for path in found}


def find_device(device_name: str) -> Hardware | None:
    """The preset for a CUDA device name, or None for one that no preset names."""
    found = [h for h in presets().values() if device_name.strip() in h.device_names]
    return found[0] if found else None


def named_hardware(name: str) -> Hardware:
    """A preset by its file's name (h100 or hardware/h100), or a user's hardware file by its path.

    Raises ConfigError for a name that is neither, and as `load_hardware`.
    """
    known = presets()
    short = name.lower().removeprefix("hardware/")
    if short in known:
        return known[short]
    if name.endswith(".toml"):
        return load_hardware(name)
    raise ConfigError(
        f"hardware {name!r} is not known; use one of {', '.join(known)}, or a TOML file like "
        "`megalite configs hardware/h100` prints"
    )


def load_device_hardware(path: str | Path, device_name: str) -> Hardware:
    """Read a user's hardware file for a device; ConfigError unless it names the device."""
    hardware = load_hardware(path)
    if device_name.strip() not in hardware.device_names:
        raise ConfigError(
            f"{path}: device_names={hardware.device_names} does not name the device that trains, "
            f"{device_name.strip()!r}; add it, or leave out log.hardware"
        )
    return hardware


def number_format(dtype: PeakFormat, tf32: bool) -> PeakFormat:
    """The format that matrix products of a dtype run in: "tf32" for float32 where it is allowed."""
    return "tf32" if tf32 and dtype == "float32" else dtype
