"""Types that may be in a checkpoint, and reading a pickle without running code."""
