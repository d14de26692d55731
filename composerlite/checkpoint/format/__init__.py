"""How the bytes of a checkpoint are laid out: the torch file and its zip, tensors of every kind, the index of a sharded
directory, the files of DeepSpeed. ``packing/`` has what may be around a file: archives and compression.
"""

__all__ = ["INDEX", "SUFFIX"]

INDEX = ".metadata"
"""The file of a sharded directory that says what is where in the others."""
SUFFIX = ".distcp"
"""The end of the names of those."""
