"""The object stores, one module for each service or protocol. A module imports its SDK, and is itself imported when a
store of its scheme is opened.
"""
