"""Files and memory of this machine: files that appear whole, reading and writing them fast and past the page cache, the
memory that it takes, and digests of bytes on their way.
"""
