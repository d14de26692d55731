"""Loggers of services that are not ours, whose packages are imported when one is built."""
