"""Layouts of the bytes of a checkpoint: the torch file and its zip, the index of a sharded directory, archives and
compression.
"""

__all__ = ["INDEX", "INDEXES", "MARKER", "MODEL", "MOST_TAIL_BYTES", "SUFFIX", "TAIL_START", "TRAIN", "WEIGHTS_INDEX"]

INDEX = ".metadata"
"""The index of a sharded directory: names, shapes and places of all items."""
SUFFIX = ".distcp"
"""Suffix of the data files of a sharded directory."""
WEIGHTS_INDEX = "model.safetensors.index.json"
"""The index of a folder of weights in safetensors."""
INDEXES = (INDEX, WEIGHTS_INDEX)
MODEL, TRAIN = "model_and_optim", "train"
"""Directories of a step: the model with its optimizer, and the files of ranks."""
MARKER = ".metadata.json"
"""The file in a step with the record of the checkpoint."""
TAIL_START = b'\n{"composerlite": '
"""The first bytes of the tail of a file: see :mod:`composerlite.checkpoint.record.tail`."""
MOST_TAIL_BYTES = 64 << 10
"""Bytes at the end of a file that contain its whole tail, unless a directory has thousands of files."""
