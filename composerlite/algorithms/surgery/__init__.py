"""Algorithms that change the model when the trainer is built."""
