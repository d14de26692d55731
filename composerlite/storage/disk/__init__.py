"""Files and memory of this machine: atomic and durable files, fast reads and writes without the page cache, buffers for
reads and writes, and digests computed meanwhile.
"""
