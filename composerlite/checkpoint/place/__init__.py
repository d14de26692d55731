"""Places of checkpoints, folders and buckets: commits in them, leases to write to them, and recovery of a commit that a
killed process left unfinished. Nothing here but ``node_disks`` imports torch.
"""
