"""Layers whose weights or tokens are split over the tp axis."""
