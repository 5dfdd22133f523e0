"""Whether the settings of a run fit each other, its world size and this machine."""
