"""How a checkpoint is found and restored: what a path or a URI means, reading and verifying files, which one a run
resumes from. ``sharded/`` has what is read of a directory.
"""
