"""A run in numbers: batches and rates by step, parameters and FLOPs, layers by stage, hardware."""
