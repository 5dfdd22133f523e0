"""Layers whose weights or tokens are split over the tp axis.

Reading order: context (shared by the layers of a chunk), grads (the store of weight gradients),
linear (column- and row-parallel), embedding, cross_entropy.
"""
