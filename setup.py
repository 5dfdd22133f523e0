"""Package map: kernels/ is installed as megalite.kernels, never as `kernels` (a PyPI package), and
configs/ as data in megalite/configs.

In a checkout megalite/kernels is a link to it; an archive without links installs all the same.
"""

from setuptools import find_packages, setup

KERNELS, CONFIGS = "megalite.kernels", "megalite.configs"

setup(
    packages=[
        *find_packages(include=["megalite", "megalite.*"], exclude=[KERNELS, f"{KERNELS}.*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in find_packages("kernels")),
        CONFIGS,
    ],
    package_dir={KERNELS: "kernels", CONFIGS: "configs"},
    package_data={
        "megalite": ["py.typed"],
        "megalite.config": ["*.toml"],
        CONFIGS: ["**/*.toml"],
        KERNELS: ["configs/*.json"],
    },
)
