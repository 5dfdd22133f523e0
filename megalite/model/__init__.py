"""Transformers made of tensor-parallel layers: embedding, blocks, head, initial values."""
