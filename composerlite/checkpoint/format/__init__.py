"""Byte formats of a checkpoint: torch file and its zip, index of a sharded directory, archives and compression."""

__all__ = ["INDEX", "INDEXES", "MARKER", "MODEL", "MOST_TAIL_BYTES", "SUFFIX", "TAIL_START", "TRAIN", "WEIGHTS_INDEX"]

INDEX = ".metadata"
"""The index of a sharded directory: names, shapes and places of all items."""
SUFFIX = ".distcp"
"""Suffix of the data files of a sharded directory."""
WEIGHTS_INDEX = "model.safetensors.index.json"
"""The index of a folder of weights in safetensors."""
INDEXES = (INDEX, WEIGHTS_INDEX)
"""Files whose presence makes a directory a checkpoint."""
MODEL, TRAIN = "model_and_optim", "train"
"""Directories in the directory of a step of ``Checkpointer``: the model with the optimizer, and the files of ranks."""
MARKER = ".metadata.json"
"""The file that a save writes last in the directory of a step, to make the directory a checkpoint."""
TAIL_START = b'\n{"composerlite": '
"""The first bytes of the tail, the record at the end of a file: see :mod:`composerlite.checkpoint.record.record`."""
MOST_TAIL_BYTES = 64 << 10
"""Bytes to read at the end of a file for the tail. Only a directory with thousands of files has a longer tail."""
