"""The layout of a run: ranks on axes, parameters on ranks and in buffers. Imports no torch.

Reading order: topology (ranks and axes), sharding (the cut of one parameter), bucket_plan (its
place in the flat buffers), rectangles (its place in checkpoints).
"""
