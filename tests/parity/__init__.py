"""The parity matrix: the tiny model at every layout against one process, in float64."""
