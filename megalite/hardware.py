"""What a GPU and its links can do: presets in configs/hardware/*.toml, found by device name.

A device that no preset names is unknown: the answer is None, never that of a similar device.
Holds data sheet figures only; what a kernel or a fabric really reaches is the planner's business.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import Field, ValidationError

from megalite.config import Section
from megalite.config_explain import explain
from megalite.config_load import read_toml
from megalite.errors import ConfigError


class Hardware(Section):
    """One kind of GPU in its usual node. Bandwidths are per GPU and direction, 1 GB = 1e9 bytes."""

    name: str
    device_names: list[str]  # as torch.cuda.get_device_name reports them; compared whole
    peak_tflops: dict[str, float]  # dtype -> dense matrix TFLOP/s; a dtype left out is unknown
    memory_gib: float = Field(gt=0)  # what CUDA reports as total, less than the nominal size
    memory_gb_per_s: float = Field(gt=0)
    nvlink_gb_per_s: float = Field(gt=0)
    network_gb_per_s: float = Field(gt=0)  # between nodes
    gpus_per_node: int = Field(ge=1)


def load_hardware(path: str | Path) -> Hardware:
    """Read one hardware file; raises ConfigError with every problem in it."""
    tree = read_toml(Path(path))
    try:
        return Hardware.model_validate(tree)
    except ValidationError as error:
        origins = {name: str(path) for name in tree}
        raise ConfigError([f"{path}: {line}" for line in explain(error, origins, set())]) from None


@cache
def presets() -> dict[str, Hardware]:
    """File name without .toml -> Hardware, for every preset that comes with megalite."""
    return {path.stem: load_hardware(path) for path in sorted(_preset_folder().glob("*.toml"))}


def find_device(device_name: str) -> Hardware | None:
    """The preset for a CUDA device name, or None for one that no preset names."""
    found = [h for h in presets().values() if device_name.strip() in h.device_names]
    return found[0] if found else None


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak TFLOP/s of a device for a config dtype ("bfloat16"); None if not known."""
    device = find_device(device_name)
    return None if device is None else device.peak_tflops.get(dtype)


def _preset_folder() -> Path:
    """configs/hardware of the source tree, or the copy that an installed package carries."""
    package = Path(__file__).resolve().parent
    folders = [package.parent / "configs" / "hardware", package / "hardware_presets"]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ConfigError(f"no hardware presets: neither {folders[0]} nor {folders[1]} is a folder")
