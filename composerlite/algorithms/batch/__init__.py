"""Algorithms that change batches, and the loss with them."""
