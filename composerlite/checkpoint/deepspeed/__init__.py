"""Checkpoints of DeepSpeed: one archive per rank, read in place, loaded into a run, or merged to a file of weights."""
