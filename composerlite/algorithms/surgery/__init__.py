"""Algorithms that change the model during the construction of the trainer."""
