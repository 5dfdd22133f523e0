"""Tokenizer, indexed datasets, and the order in which their samples are trained on.

Reading order: indexed (the files), dataset (samples of a token stream), sampler (the order of one
source), blend and windows (of several), batches, loader; then tokenizer, and sidecar, fingerprint,
vocab and inspection, which check files. Only batches imports torch. Importing the package imports
none of its modules.
"""
