"""The sections of `benchmarks/gpu.py`: each gives rows, which are measured one by one while there is time."""
