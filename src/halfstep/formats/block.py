"""Block formats: elements of a scalar format in tiles that share a scale."""

from dataclasses import replace

from halfstep.formats import codebooks, integer, ocp
from halfstep.formats.floating import BlockFormat


_MX = "OCP Microscaling Formats (MX) 1.0, sections 5 and 6; ceil, even and rceil as in torchao"
_MX_RULES = ("floor", "ceil", "even", "rceil")

mxfp8_e4m3 = BlockFormat("mxfp8_e4m3", ocp.float8_e4m3fn, (1, 32), _MX_RULES, 8, _MX, ("mxfp8",))
mxfp8_e5m2 = BlockFormat("mxfp8_e5m2", ocp.float8_e5m2, (1, 32), _MX_RULES, 8, _MX)
mxfp6_e3m2 = BlockFormat("mxfp6_e3m2", ocp.float6_e3m2fn, (1, 32), _MX_RULES, 8, _MX)
mxfp6_e2m3 = BlockFormat("mxfp6_e2m3", ocp.float6_e2m3fn, (1, 32), _MX_RULES, 8, _MX)
mxfp4 = BlockFormat("mxfp4", ocp.float4_e2m1fn, (1, 32), _MX_RULES, 8, _MX, ("mxfp4_e2m1",))
mxint8 = BlockFormat("mxint8", integer.ocp_int8, (1, 32), _MX_RULES, 8, _MX)

_NVFP4 = "NVIDIA Transformer Engine, NVFP4 recipe; two_level_up is our own"
nvfp4 = BlockFormat("nvfp4", ocp.float4_e2m1fn, (1, 16), ("two_level", "two_level_up", "four_over_six"), 8, _NVFP4)

_DEEPSEEK = "DeepSeek-V3, arXiv 2412.19437, section 3.3: tiles of 1x128 and blocks of 128x128"
fp8_1x128 = BlockFormat("fp8_1x128", ocp.float8_e4m3fn, (1, 128), ("absmax", "rceil"), 32, _DEEPSEEK)
fp8_128x128 = BlockFormat("fp8_128x128", ocp.float8_e4m3fn, (128, 128), ("absmax", "rceil"), 32, _DEEPSEEK)

_QLORA = "Dettmers et al. 2023, arXiv 2305.14314: blocks of 64, absmax"
nf4 = BlockFormat("nf4", codebooks.nf4, (1, 64), ("absmax", "double_absmax"), 32, _QLORA)
bnb_fp4 = BlockFormat("bnb_fp4", codebooks.bnb_fp4, (1, 64), ("absmax", "double_absmax"), 32, _QLORA)
af4 = BlockFormat("af4", codebooks.af4, (1, 64), ("absmax", "double_absmax"), 32, "Yoshida 2023, arXiv 2306.06965")
dynamic8 = BlockFormat(
    "dynamic8", codebooks.dynamic8, (1, 256), ("absmax",), 32, "Dettmers et al. 2022, arXiv 2110.02861"
)

_INT8 = "Dettmers et al. 2022, arXiv 2208.07339 (LLM.int8()), sections 2.1 and 3"
int8_tensor = BlockFormat("int8_tensor", integer.int8, (0, 0), ("absmax",), 32, _INT8)
int8_row = BlockFormat("int8_row", integer.int8, (1, 0), ("absmax",), 32, _INT8)
llm_int8 = replace(int8_row, name="llm_int8", outliers=6.0)
int4_64 = BlockFormat("int4_64", integer.int4, (1, 64), ("absmax",), 32, "absmax blocks of 64 with 15 levels")
uint8_row = BlockFormat("uint8_row", integer.uint8, (1, 0), ("affine",), 40, "affine: a scale and a zero point per row")
uint4_64 = BlockFormat(
    "uint4_64", integer.uint4, (1, 64), ("affine",), 40, "affine: a scale and a zero point per block"
)
