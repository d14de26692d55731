"""Callbacks that look into the model, the memory and the machine."""
