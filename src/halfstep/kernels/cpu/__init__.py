"""Kernels for the CPU, compiled by numba on the user's machine: no compiler needed."""
