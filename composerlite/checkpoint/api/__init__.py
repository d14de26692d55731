"""The functions for loops of one's own, as OLMo-core names them, and the Checkpointer."""
