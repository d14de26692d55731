"""Everything that training changes, and what checkpoints hold of it."""
