"""Where checkpoints are: folders and buckets, what is committed in them, who may write to them, and how a commit that a
killed process left unfinished is completed or removed. Nothing here but ``node_disks`` imports torch.
"""
