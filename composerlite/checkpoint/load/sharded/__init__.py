"""What each rank reads of a sharded directory: the index, byte ranges, keys, what one rank reads for the others."""
