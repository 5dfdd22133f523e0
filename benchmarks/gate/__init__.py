"""Parts of `gpu_gate`."""
