"""Package map: kernels/ is installed as megalite.kernels, never as `kernels` (a PyPI package).

In a checkout megalite/kernels is a link to it; an archive without links installs all the same.
"""

from setuptools import find_packages, setup

KERNELS = "megalite.kernels"

setup(
    packages=[
        *find_packages(include=["megalite", "megalite.*"], exclude=[KERNELS, f"{KERNELS}.*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in find_packages("kernels")),
        "megalite.hardware_presets",
    ],
    package_dir={KERNELS: "kernels", "megalite.hardware_presets": "configs/hardware"},
    package_data={
        "megalite": ["py.typed"],
        "megalite.config": ["*.toml"],
        "megalite.hardware_presets": ["*.toml"],
        KERNELS: ["configs/*.json"],
    },
)
