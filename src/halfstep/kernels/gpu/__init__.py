"""Fast paths for CUDA tensors, in Triton: `run` of a file each, as in `kernels.cpu`."""
