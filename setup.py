"""Package map: kernels/ is installed as megalite.kernels, never as `kernels` (a PyPI package), and
configs/ as data in megalite/configs.

In a checkout megalite/kernels is a link, and in a source archive, too; an archive without links
installs all the same.
"""

import os

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

KERNELS, CONFIGS = "megalite.kernels", "megalite.configs"


class SourceArchive(sdist):
    """A source archive with the link megalite/kernels, which setuptools leaves out."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        os.symlink("../kernels", os.path.join(base_dir, "megalite", "kernels"))


setup(
    packages=[
        *find_packages(include=["megalite", "megalite.*"], exclude=[KERNELS, f"{KERNELS}.*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in [*find_packages("kernels"), "configs"]),
        CONFIGS,
        *(f"{CONFIGS}.{name}" for name in ("runs", "models", "hardware")),
    ],
    package_dir={KERNELS: "kernels", CONFIGS: "configs"},
    package_data={"": ["*.toml", "*.json", "py.typed"]},
    cmdclass={"sdist": SourceArchive},
)
