"""The IEEE 754 formats, and bf16 and tf32, which have the exponent of fp32 and fewer mantissa bits."""

from halfstep.formats.floating import ieee


fp32 = ieee("fp32", 8, 23, "IEEE 754-2019 binary32", aliases=("float32", "float", "e8m23"))
tf32 = ieee("tf32", 8, 10, "NVIDIA A100 whitepaper: fp32's range, fp16's precision", ("e8m10",), container_bits=32)
fp16 = ieee("fp16", 5, 10, "IEEE 754-2019 binary16", aliases=("float16", "half", "e5m10"))
bf16 = ieee("bf16", 8, 7, "Kalamkar et al. 2019, arXiv 1905.12322", aliases=("bfloat16", "e8m7"))
