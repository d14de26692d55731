"""Tools for checkpoints that others save and load, for the command line and the report: survey, copy, compare, convert.

``pointing``, ``surveying`` and ``copying`` import no torch.
"""
