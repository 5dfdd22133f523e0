"""megalite: 3D-parallel training of transformers too large for one GPU."""

__version__ = "0.1.0"
