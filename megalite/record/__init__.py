"""A run's record and its views: metrics.jsonl, console lines, TensorBoard, wandb, report.

Reading order: records (the file), run_record and metrics (the values of its lines), step_clock and
param_stats (measured in a step); sinks, views, tensorboard_sink, wandb_sink; console, step_lines;
report (of a finished run) and doctor (of a machine).
"""
