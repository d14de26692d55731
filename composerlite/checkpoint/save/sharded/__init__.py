"""What each rank writes of a sharded directory: the plan that the ranks make together, the copy, the files."""
