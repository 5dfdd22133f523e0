"""The operations in plain torch: their definition, and the path of CPUs."""
