"""Records of a checkpoint as plain data and pure functions: its name, its manifest, the attempt of a run that it is of,
the parts of the state in it, and which ones are kept. No function here opens a checkpoint.
"""
