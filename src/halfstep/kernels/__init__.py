"""Fast paths: each file's `run(...)` gives the same bits as the reference that it replaces.

A `run` that does not support the call returns False or None, and so does the function that computes the constants that
its kernel is compiled for.
"""
