"""Text from checkpoints.

Reading order: `sampling` (chooses a token), `generate`, then `pieces` and `chat` (text in and out),
and `write`, which is the verb after its options.
"""
