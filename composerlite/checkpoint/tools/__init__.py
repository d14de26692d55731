"""Tools for the command line and the report: survey, copy, compare and convert checkpoints.

``pointing``, ``surveying`` and ``copying`` import no torch.
"""
