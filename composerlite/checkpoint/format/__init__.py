"""Layouts of the bytes of a checkpoint: the torch file and its zip, the index of a sharded directory, and what may be
around a file: archives and compression.
"""

__all__ = ["INDEX", "SUFFIX"]

INDEX = ".metadata"
"""The file of a sharded directory that says what is where in the others."""
SUFFIX = ".distcp"
"""The end of the names of those."""
