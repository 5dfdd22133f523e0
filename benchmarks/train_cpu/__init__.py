"""Training on CPU beside a plain transformers loop: `python -m benchmarks.train_cpu`."""
