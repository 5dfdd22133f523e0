"""Text from checkpoints. Reading order: `sampling` (chooses a token), then `generate`."""
