"""Checkpoints of DeepSpeed: an archive for each rank, read in place, loaded into a run, or merged to a file."""
