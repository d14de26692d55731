"""Saving of a checkpoint: the copy of the state, the files of each rank, the vote of the ranks, the commit, and
publishing in a bucket.
"""
