"""Communicators: mesh, collectives, what they moved and waited for, agreement of ranks."""
