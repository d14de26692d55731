"""Layouts of the bytes of a checkpoint: the torch file and its zip, the index of a sharded directory, and what may be
around a file: archives and compression.
"""

__all__ = ["INDEX", "INDEXES", "MARKER", "MODEL", "MOST_TAIL_BYTES", "SUFFIX", "TAIL_START", "TRAIN", "WEIGHTS_INDEX"]

INDEX = ".metadata"
"""The file of a sharded directory that says what is where in the others."""
SUFFIX = ".distcp"
"""The end of the names of those."""
WEIGHTS_INDEX = "model.safetensors.index.json"
"""The file that says so of a folder of weights in safetensors."""
INDEXES = (INDEX, WEIGHTS_INDEX)
MODEL, TRAIN = "model_and_optim", "train"
"""The directories in a step: of the model and its optimizer, and of the files of ranks."""
MARKER = ".metadata.json"
"""The file that marks a step as a checkpoint."""
TAIL_START = b'\n{"composerlite": '
"""The first bytes of the tail of a file: see :mod:`composerlite.checkpoint.record.tail`."""
MOST_TAIL_BYTES = 64 << 10
"""Bytes at the end of a file that contain its whole tail, unless a directory has thousands of files."""
