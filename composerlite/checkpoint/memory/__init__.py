"""Checkpoints in the memory of a machine, and their replicas in the memory of another machine."""
