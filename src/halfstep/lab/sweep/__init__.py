"""Sweeps: an experiment at every point of a grid, in one folder; where its runs are executed, and its report."""
