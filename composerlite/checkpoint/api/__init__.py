"""Functions for custom training loops, with OLMo-core's names, and the Checkpointer."""
