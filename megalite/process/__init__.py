"""The lives of processes: launchers, devices, signals, watching each other, ending together."""
