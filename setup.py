"""Package map: kernels/ is installed as megalite.kernels, never as kernels (a PyPI package)."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megalite", "megalite.*"]),
        "megalite.kernels",
        "megalite.hardware_presets",
    ],
    package_dir={
        "megalite.kernels": "kernels",
        "megalite.hardware_presets": "configs/hardware",
    },
    package_data={
        "megalite.hardware_presets": ["*.toml"],
        "megalite.kernels": ["configs/*.json"],
    },
)
