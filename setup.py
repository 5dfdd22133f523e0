"""Package map: configs/hardware is installed as megalite.hardware_presets.

megalite/kernels is a link to kernels/, which is never installed as `kernels` (a PyPI package).
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megalite", "megalite.*"]),
        "megalite.hardware_presets",
    ],
    package_dir={"megalite.hardware_presets": "configs/hardware"},
    package_data={
        "megalite": ["py.typed"],
        "megalite.hardware_presets": ["*.toml"],
        "megalite.kernels": ["configs/*.json"],
    },
)
