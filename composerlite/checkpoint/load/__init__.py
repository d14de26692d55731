"""Loading: a checkpoint is found, verified, read and restored; the choice of the one that a run resumes from."""
