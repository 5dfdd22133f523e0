"""Hardware presets: known devices by their whole name, everything else unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.errors import ConfigError
from megalite.run.hardware import (
    find_device,
    load_device_hardware,
    load_hardware,
    number_format,
    presets,
)
from tests import ROOT


def test_every_preset_loads() -> None:
    folder = ROOT / "configs" / "hardware"
    assert set(presets()) == {path.stem for path in folder.glob("*.toml")}
    assert {"a100", "b200", "h100", "h200"} <= set(presets())


def test_no_device_name_stands_in_two_presets() -> None:
    names = [name for hardware in presets().values() for name in hardware.device_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
    ],
)
def test_peaks_of_known_devices(device: str, tflops: float) -> None:
    known = find_device(device)
    assert known is not None
    assert known.peak_tflops["bfloat16"] == tflops


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H100 PCIe",  # slower than SXM
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a slice
        "NVIDIA H20",
        "NVIDIA GeForce RTX 4090",
        "cpu",
        "",
    ],
)
def test_similar_and_unknown_devices_are_unknown(device: str) -> None:
    assert find_device(device) is None


def test_float32_products_in_tf32_have_a_peak_of_their_own() -> None:
    assert number_format("float32", tf32=True) == "tf32"
    assert number_format("float32", tf32=False) == "float32"
    assert number_format("bfloat16", tf32=True) == "bfloat16"
    assert presets()["h200"].peak_tflops["tf32"] == 494.7
    assert presets()["h200"].peak_tflops["float32"] == 67


OWN = """
name = "mine"
device_names = ["x86_64", "cpu"]
memory_gib = 8
memory_gb_per_s = 20
nvlink_gb_per_s = 1
network_gb_per_s = 1
gpus_per_node = 1
[peak_tflops]
float32 = 0.1
"""


def test_a_file_of_ones_own_must_name_the_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    assert load_device_hardware(path, "cpu").peak_tflops == {"float32": 0.1}
    with pytest.raises(ConfigError, match="does not name the device that trains, 'NVIDIA H20'"):
        load_device_hardware(path, "NVIDIA H20")
    path.write_text(OWN.replace("float32 = 0.1", "bf16 = 0.1\nfloat32 = 0"))
    with pytest.raises(ConfigError) as caught:
        load_hardware(path)
    assert len(caught.value.problems) == 2


def test_a_dtype_without_a_figure_is_unknown() -> None:
    assert "float64" not in presets()["h200"].peak_tflops


def test_a_wrong_hardware_file_names_file_and_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "x"\ndevice_names = ["x"]\nmemory_gib = "80"\n[peak_tflops]\na = 1\n')
    with pytest.raises(ConfigError) as caught:
        load_hardware(path)
    lines = caught.value.problems
    assert any("memory_gib=" in line and "needs a number" in line for line in lines)
    assert any("gpus_per_node is not set" in line for line in lines)
    assert all(line.startswith(str(path)) for line in lines)
