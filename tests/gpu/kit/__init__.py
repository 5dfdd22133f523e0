"""A pretended CUDA device: the shim, the recorder, the steps that run on it, and their analysis.

The reading order is `shim` (what lets a torch without CUDA work on cuda tensors), `case` (what
runs), `recorder` and `device` (what is written down, in a process of its own: `child`), `trace`
(the record, without torch) and `order` (what ranks' records say together). `values` is the other
way: a device that computes, in the host's memory, for whole runs.
"""
