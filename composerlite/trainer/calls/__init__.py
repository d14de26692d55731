"""Calls of ``fit``: their numbers, and what they and the constructor are given that a resume compares or restores."""
