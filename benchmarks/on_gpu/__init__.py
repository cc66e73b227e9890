"""The sections of `benchmarks/gpu.py`: each yields rows, which are measured one by one while there is time."""
