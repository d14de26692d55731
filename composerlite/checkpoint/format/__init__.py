"""Layouts of the bytes of a checkpoint: the torch file and its zip, the index of a sharded directory, and what may be
around a file: archives and compression.
"""

__all__ = ["INDEX", "INDEXES", "SUFFIX", "WEIGHTS_INDEX"]

INDEX = ".metadata"
"""The file of a sharded directory that says what is where in the others."""
SUFFIX = ".distcp"
"""The end of the names of those."""
WEIGHTS_INDEX = "model.safetensors.index.json"
"""The file that says so of a folder of weights in safetensors."""
INDEXES = (INDEX, WEIGHTS_INDEX)
