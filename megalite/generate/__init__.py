"""Text from checkpoints."""
