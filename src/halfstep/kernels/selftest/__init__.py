"""Every kernel against the reference, bit for bit, on random and hard inputs: `halfstep doctor`."""

from halfstep.kernels.selftest import elements, matrices, tiles


CPU = (*elements.CPU, *tiles.CPU, *matrices.CPU)
GPU = (*elements.GPU, *tiles.GPU)
"""The Triton kernels: on a GPU, or on CPUs in Triton's interpreter."""
