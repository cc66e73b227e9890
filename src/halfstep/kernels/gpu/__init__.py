"""Fast paths for CUDA tensors, in Triton: each offers `supports` and `run`, as the ones in `kernels.cpu` do."""
