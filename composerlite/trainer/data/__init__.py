"""The position of a run in its data, by kind of loader; the share of each rank; resuming there."""
