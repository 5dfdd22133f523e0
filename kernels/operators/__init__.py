"""The custom operators `torch.ops.megalite.*` behind `megalite.kernels.functional`."""
