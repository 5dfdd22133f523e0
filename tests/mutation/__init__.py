"""Faults planted one at a time, and the tests that see them: `python -m tests.mutation`."""
