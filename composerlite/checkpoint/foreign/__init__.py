"""Checkpoints of other systems: recognised by contents, and converted to our form. No code in a checkpoint is run."""
