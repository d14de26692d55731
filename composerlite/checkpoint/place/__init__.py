"""Places of checkpoints (folders and buckets), commits and deletions in a place, and leases of a run.

Only ``node_disks`` imports torch.
"""
