"""The processes of a run: launchers, devices, signals, watching each other, ending together.

Reading order: launcher (who this process is), env (joining the others), local (starting all ranks
here), failures; board and watch (finding the rank that hangs); signals, determinism, secrets.
"""
