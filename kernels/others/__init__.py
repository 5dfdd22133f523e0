"""Kernels of other packages, behind the same methods."""
