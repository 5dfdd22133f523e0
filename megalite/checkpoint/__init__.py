"""Checkpoints that any layout writes and any layout reads. No pickle anywhere.

A checkpoint is a directory with one safetensors file per rank (its shard) and one manifest. Reading
order: pieces (the tensors that a rank passes in), manifest (the description on disk), shard_file
(the numbers on disk), save, find, load, store (the directories of a run), disk. Works on named
tensors and their place in the global tensor; independent of model, optimizer and trainer.
"""
