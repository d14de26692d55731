"""Callbacks that inspect activations, GPU memory and the machine."""
