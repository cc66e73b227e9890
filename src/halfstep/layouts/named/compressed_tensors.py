"""compressed-tensors' layouts, which vLLM, SGLang and transformers load.

Source: compressed-tensors 0.20, `quant_scheme` presets and `compressors`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfstep import formats
from halfstep.layouts.base import Exponents, Float32, Layout, TwoLevels
from halfstep.quant import ROW, TENSOR, Tile


@dataclass(frozen=True)
class _Config:
    """What config.json says of the weights, and of the inputs that servers round beside them."""

    format: str
    weights: tuple[tuple[str, Any], ...]
    inputs: tuple[tuple[str, Any], ...] | None
    """None leaves them as they are."""
    bits: int = 8

    def __call__(self, ignore: Sequence[str]) -> dict[str, Any]:
        common = {"num_bits": self.bits, "type": "float", "symmetric": True}
        weights = {**common, "dynamic": False, **_plain(self.weights)}
        inputs = None if self.inputs is None else {**common, **_plain(self.inputs)}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "output_activations": None, "format": self.format}},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }


def _plain(items: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


_E4M3, _E2M1 = formats.get("e4m3fn"), formats.get("e2m1fn")
_TOKEN = (("strategy", "token"), ("dynamic", True))
_GROUP32 = (("strategy", "group"), ("group_size", 32), ("scale_dtype", "torch.uint8"))

fp8_tensor = Layout(
    "fp8-tensor",
    "E4M3 weights with one float32 scale a tensor; inputs rounded by token at every call.",
    _E4M3,
    TENSOR,
    Float32(flat=True),
    _Config("float-quantized", (("strategy", "tensor"),), _TOKEN),
)

fp8_static = Layout(
    "fp8-static",
    "fp8-tensor with one float32 scale for the inputs of each layer, as training left it.",
    _E4M3,
    TENSOR,
    Float32(flat=True),
    _Config("float-quantized", (("strategy", "tensor"),), (("strategy", "tensor"), ("dynamic", False))),
    static=True,
)

fp8_channel = Layout(
    "fp8-channel",
    "E4M3 weights with one float32 scale for an output channel; inputs rounded by token at every call.",
    _E4M3,
    ROW,
    Float32(),
    _Config("float-quantized", (("strategy", "channel"),), _TOKEN),
    rank=1,
)

fp8_block = Layout(
    "fp8-block",
    "E4M3 weights with one float32 scale for a block of 128x128; inputs rounded in tiles of 1x128 at every call.",
    _E4M3,
    Tile(128, 128),
    Float32(),
    _Config(
        "float-quantized",
        (("strategy", "block"), ("block_structure", (128, 128))),
        (("strategy", "group"), ("group_size", 128), ("dynamic", True)),
    ),
    multiple=(128, 128),
    rank=2,
)

mxfp8 = Layout(
    "mxfp8",
    "E4M3 weights with one power of two for 32 columns; inputs rounded alike at every call.",
    _E4M3,
    Tile(1, 32),
    Exponents(),
    _Config("mxfp8-quantized", _GROUP32, (*_GROUP32, ("dynamic", True))),
    multiple=(1, 32),
    rank=4,
)

mxfp4 = Layout(
    "mxfp4",
    "E2M1 weights with one power of two for 32 columns; inputs rounded alike at every call.",
    _E2M1,
    Tile(1, 32),
    Exponents(),
    _Config("mxfp4-pack-quantized", _GROUP32, (*_GROUP32, ("dynamic", True)), bits=4),
    codes="weight_packed",
    multiple=(1, 32),
    rank=5,
)

nvfp4 = Layout(
    "nvfp4",
    "E2M1 weights with an E4M3 scale for 16 columns, and a float32 scale of the tensor; inputs stay in 16 bits.",
    _E2M1,
    Tile(1, 16),
    TwoLevels(),
    _Config(
        "nvfp4-pack-quantized",
        (("strategy", "tensor_group"), ("group_size", 16), ("scale_dtype", "torch.float8_e4m3fn")),
        None,
        bits=4,
    ),
    codes="weight_packed",
    multiple=(1, 16),
    rank=6,
)
