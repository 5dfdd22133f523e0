"""Measurements of megalite; run from a checkout, not installed."""
