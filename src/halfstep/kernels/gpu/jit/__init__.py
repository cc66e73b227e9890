"""Triton kernels: the only files that import triton, imported when the first CUDA tensor needs one (`gpu.functions`).

Triton never converts a float here: values are loaded and stored through integer pointers and rounded on their bits, so
that a GPU, Triton's interpreter and the reference agree on every bit. `/`, `tl.sqrt` and `tl.exp` are approximate on a
GPU; `tl.div_rn` and `tl.sqrt_rn` are correctly rounded.
"""
