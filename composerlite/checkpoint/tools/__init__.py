"""Tools for the command line and the report: survey, copy, compare and convert checkpoints.

``surveying`` and ``copying`` import no torch.
"""
