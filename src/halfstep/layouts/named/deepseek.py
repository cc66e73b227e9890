"""DeepSeek-V3's layout of FP8 weights, which transformers calls `fp8`.

Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; transformers 5.23, integrations/finegrained_fp8.py.
"""

from collections.abc import Sequence
from typing import Any

from halfstep import formats
from halfstep.layouts.base import Float32, Layout
from halfstep.quant import Tile


def _config(ignore: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(ignore),
    }


deepseek_fp8 = Layout(
    "deepseek-fp8",
    "fp8-block as DeepSeek-V3 has it: scales called weight_scale_inv, which are multiplied by nevertheless.",
    formats.get("e4m3fn"),
    Tile(128, 128),
    Float32("weight_scale_inv"),
    _config,
    multiple=(128, 128),
    rank=3,
)
