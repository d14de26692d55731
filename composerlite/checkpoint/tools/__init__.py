"""What the command line and the report do with checkpoints that others save and load: survey, copy, compare, convert.

``pointing``, ``surveying`` and ``copying`` import no torch.
"""
