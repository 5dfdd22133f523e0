"""Training: the loop of a rank, the engine it drives, resuming, evaluation."""
