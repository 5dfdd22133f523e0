"""Transformers made of tensor-parallel layers: embedding, blocks, head, initial values.

Reading order: transformer (a pipeline stage of the model), block (one layer), then its parts:
attention, mlp, norm, position, dropout. sequence is the input that all layers share, init the
initial weights.
"""
