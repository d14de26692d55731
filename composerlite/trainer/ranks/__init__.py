"""The model over ranks: how it is spread, what the ranks tell each other in a batch; DeepSpeed, which does both."""
