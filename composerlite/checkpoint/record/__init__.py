"""Plain data and pure functions about checkpoints: records, names, attempts of a run, and retention.

No function here opens a checkpoint.
"""
