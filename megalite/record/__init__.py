"""A run's record and its views: metrics.jsonl, console lines, TensorBoard, wandb, report."""
