"""Sweeps: an experiment at every point of a grid, in one folder; how the runs are placed, and what they show."""
