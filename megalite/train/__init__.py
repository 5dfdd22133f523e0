"""Training: the loop of a rank, the engine it drives, resuming, evaluation.

Reading order: loop, then engine and batch (one step), run_data, evaluate, position and policies.
Resuming: state (in checkpoints), changes (of settings), resume, weights, origin, retention. Before
the loop: launch, rank, start_checks, kernel_choice. Beside it: pipeline_trace, info,
run_tokenizer. `megalite eval`: score.
"""
