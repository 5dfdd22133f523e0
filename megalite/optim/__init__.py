"""The distributed optimizer: flat buckets, ZeRO-1, AdamW and Muon, clipping, loss scaling.

Reading order: buffers (memory), shard (the part of the state that this rank owns), grad_reduce and
param_gather (what is sent), norm, muon, then distributed_optimizer, which calls them
in order. Beside them: groups, lr_schedule, loss_scale and non_finite, and state_tensors (the state
as checkpoints see it).
"""
