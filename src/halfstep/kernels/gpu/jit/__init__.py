"""What runs on the GPU: the only files that import triton, loaded when the first CUDA tensor asks (`gpu.functions`).

They never let Triton convert a float: numbers are loaded and stored through integer pointers and rounded on their
bits, so that a GPU, Triton's interpreter and the reference agree on every bit. `/`, `tl.sqrt` and `tl.exp` are
approximate on a GPU: `tl.div_rn` and `tl.sqrt_rn` round once.
"""
