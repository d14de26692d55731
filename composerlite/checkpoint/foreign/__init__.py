"""Checkpoints of other systems: recognised by what they hold, and given the form of ours. Nothing in them runs."""
