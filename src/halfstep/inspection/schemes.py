"""The layouts in which quantized weights are published: one entry each, by names, types and shapes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfstep.inspection.files import StoredTensor


Shape = tuple[int, ...]
Parts = Mapping[str, StoredTensor]
"""The tensors of one layer by their suffix; the codes under "codes"."""

_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
_FLOATS = ("float32", "bfloat16", "float16")
_E8M0 = ("float8_e8m0fnu", "uint8")


@dataclass(frozen=True)
class Packed:
    """Codes are contiguous along the last dimension, `per` in each stored element."""

    per: int = 1

    def shape(self, parts: Parts) -> Shape | None:
        """The shape of the weight; None where the parts contradict each other."""
        *lead, columns = parts["codes"].shape or (1,)
        return *lead, columns * self.per


@dataclass(frozen=True)
class Blocks:
    """The last dimension is the codes of one block, two per byte."""

    def shape(self, parts: Parts) -> Shape | None:
        """The shape of the weight, with the blocks of a row joined."""
        *lead, blocks, columns = parts["codes"].shape if len(parts["codes"].shape) > 1 else (1, 1)
        return *lead, blocks * columns * 2


@dataclass(frozen=True)
class Words:
    """32-bit words of codes along dimension `axis`, whose number of codes is the last dimension of the part `sized`."""

    axis: int
    sized: str

    def shape(self, parts: Parts) -> Shape | None:
        """The shape with that size along the axis; with 8 codes per word where the part is missing."""
        shape = list(parts["codes"].shape)
        part = parts.get(self.sized)
        if len(shape) != 2:
            return None
        shape[self.axis] = part.shape[-1] if part is not None and part.shape else 8 * shape[self.axis]
        return shape[0], shape[1]


@dataclass(frozen=True)
class StoredShape:
    """The shape is stored in the part `sized`; rows are padded to whole words."""

    sized: str

    def shape(self, parts: Parts) -> Shape | None:
        """The shape in that part, if it is possible; with 8 codes per word where the part is missing."""
        codes, part = parts["codes"].shape, parts.get(self.sized)
        if len(codes) != 2:
            return None
        if part is None:
            return codes[0], 8 * codes[1]
        shape = [int(value) for piece in part.chunks(64) for value in piece] if 0 < part.numel <= 4 else []
        return tuple(shape) if len(shape) == 2 and shape[0] == codes[0] and shape[1] >= codes[1] else None


@dataclass(frozen=True)
class Scheme:
    """One layout. A layer's codes are called STEM + `codes`, its other parts STEM + their suffix.

    A suffix that begins with "/" is that of another tensor of the weight's module.
    """

    name: str
    codes: str
    dtypes: tuple[str, ...]
    scale: str
    scale_dtypes: tuple[str, ...]
    methods: tuple[str, ...]
    """Its names in config.json: `quantization_config.quant_method`."""
    packing: Packed | Blocks | Words | StoredShape = Packed()
    format: str | None = None
    """The format of a code; None for the stored type itself."""
    tile: tuple[int, int] | None = None
    """The rows and columns that share a scale, 0 for all; None where it follows from the shapes."""
    needs: tuple[str, ...] = ()
    """Other parts that every layer has."""
    may: tuple[str, ...] = ()
    """Parts that a layer may have."""
    flat: bool = False
    """Whether scales are of blocks of the flat codes, independent of rows."""
    turned: bool = False
    """Whether the scales are those of the transposed weight."""
    also: str = ""
    """More text for the description."""


SCHEMES = (
    # transformers integrations/finegrained_fp8.py, vLLM quantization/fp8.py: DeepSeek-V3, Qwen3-FP8. The scale is
    # multiplied, whatever its name says.
    Scheme("fine-grained FP8", "", _FP8, "_scale_inv", (*_FLOATS, *_E8M0), ("fp8",), tile=(128, 128)),
    # compressed-tensors mxfp8-quantized, NVIDIA ModelOpt MXFP8
    Scheme("MXFP8", "", _FP8, "_scale", _E8M0, ("compressed-tensors", "modelopt", "mxfp8"), tile=(1, 32)),
    # compressed-tensors float-quantized, ModelOpt FP8, transformers integrations/fbgemm_fp8.py
    Scheme(
        "FP8", "", _FP8, "_scale", _FLOATS, ("compressed-tensors", "modelopt", "fbgemm_fp8", "fp8"),
        may=("/input_scale",),
    ),
    # ModelOpt NVFP4: vLLM quantization/modelopt.py
    Scheme(
        "NVFP4", "", ("uint8",), "_scale", ("float8_e4m3fn",), ("modelopt", "modelopt_fp4", "nvfp4"), Packed(2),
        "float4_e2m1fn", (1, 16), needs=("_scale_2",), may=("/input_scale",), also="and a float32 scale of the tensor",
    ),
    # compressed-tensors nvfp4-pack-quantized, whose tensor scale is divided by
    Scheme(
        "NVFP4", "_packed", ("uint8",), "_scale", ("float8_e4m3fn",), ("compressed-tensors",), Packed(2),
        "float4_e2m1fn", (1, 16), needs=("_global_scale",), may=("/input_global_scale",),
        also="and a float32 scale of the tensor",
    ),
    # compressed-tensors mxfp4-pack-quantized
    Scheme(
        "MXFP4", "_packed", ("uint8",), "_scale", _E8M0, ("compressed-tensors",), Packed(2), "float4_e2m1fn", (1, 32)
    ),
    # gpt-oss: transformers integrations/mxfp4.py
    Scheme("MXFP4", "_blocks", ("uint8",), "_scales", _E8M0, ("mxfp4",), Blocks(), "float4_e2m1fn", (1, 32)),
    # bitsandbytes functional.py, QuantState.as_dict(packed=True)
    *(
        Scheme(
            f"bitsandbytes {format}", "", ("uint8",), ".absmax", ("float32", "uint8"), ("bitsandbytes",), Packed(2),
            format, needs=(".quant_map", f".quant_state.bitsandbytes__{format}"),
            may=(".nested_absmax", ".nested_quant_map"), flat=True,
        )
        for format in ("nf4", "fp4")
    ),
    # bitsandbytes nn/modules.py, Linear8bitLt
    Scheme(
        "bitsandbytes int8", ".weight", ("int8",), ".SCB", _FLOATS, ("bitsandbytes",), tile=(1, 0),
        may=(".weight_format",),
    ),
    # AutoGPTQ and GPTQModel: qweight (in / 8, out), scales (in / group, out); a group's order is in g_idx
    Scheme(
        "GPTQ", ".qweight", ("int32",), ".scales", _FLOATS, ("gptq",), Words(0, ".g_idx"), "int",
        needs=(".qzeros", ".g_idx"), also="and zero points",
    ),
    # AutoAWQ: qweight (in, out / 8), scales (in / group, out)
    Scheme(
        "AWQ", ".qweight", ("int32",), ".scales", _FLOATS, ("awq",), Words(1, ".scales"), "int", needs=(".qzeros",),
        also="and zero points",
    ),
    # compressed-tensors pack-quantized
    Scheme(
        "packed int", "_packed", ("int32",), "_scale", _FLOATS, ("compressed-tensors",), StoredShape("_shape"), "int",
        needs=("_shape",), may=("_zero_point", "_g_idx"),
    ),
    # compressed-tensors int-quantized
    Scheme("int8", "", ("int8",), "_scale", _FLOATS, ("compressed-tensors",), may=("_zero_point", "/input_scale")),
    # transformers integrations/eetq.py
    Scheme("EETQ int8", "", ("int8",), "_scales", _FLOATS, ("eetq",)),
    # torchao prototype/safetensors: the inner tensors of a tensor subclass
    Scheme(
        "torchao", "_qdata", (*_FP8, "int8"), "_scale", (*_FLOATS, "float8_e8m0fnu"), ("torchao",),
        may=("_zero_point",),
    ),
    # torchao quantization/quantize_/workflows/int4/int4_tensor.py
    Scheme(
        "torchao int4", "_qdata", ("uint8",), "_scale", _FLOATS, ("torchao",), Packed(2), "int4", turned=True,
        needs=("_zero_point",), also="and zero points",
    ),
)  # fmt: skip
"""All layouts; the first that fits a layer wins."""


BLOCKS = (128, 64, 32, 16, 256, 512, 1024, 2048, 4096)
"""Lengths of blocks, the most common ones first."""


def tile_of(shape: Shape, scale: Shape, preferred: tuple[int, int] | None) -> tuple[int, int] | None:
    """The number of rows and columns that share each scale, 0 for all; None where the shapes do not fit.

    >>> tile_of((256, 512), (2, 4), (128, 128)), tile_of((256, 512), (256, 1), None), tile_of((256, 512), (1,), None)
    ((128, 128), (1, 0), (0, 0))
    """
    rows, columns = (1, *shape)[-2:]
    lead = shape[:-2]
    usual = tuple(-(-n // (b or n)) for n, b in zip((rows, columns), preferred or (0, 0), strict=True))
    if preferred is not None and scale == (*lead, *usual):
        return preferred
    if math.prod(scale) == 1 or scale == lead:
        return 0, 0
    if scale in ((rows,), (*lead, rows)):
        scale = (*scale, 1)
    if scale[:-2] != lead or len(scale) < 2:
        return None
    down, across = (
        0 if count == 1 else 1 if count == n else block_of(n, count)
        for n, count in zip((rows, columns), scale[-2:], strict=True)
    )
    return None if down is None or across is None else (down, across)


def block_of(values: int, scales: int) -> int | None:
    """The length of blocks, the last of which may be short; None if it is no common one."""
    return next((size for size in BLOCKS if -(-values // size) == scales), None)


def written(shape: Sequence[int | str]) -> str:
    """A shape as text."""
    return "x".join(str(size) for size in shape) or "scalar"
