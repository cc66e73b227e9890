"""Every layout: its tensors represent the quantizer's values, and give back the same codes and scales."""

from dataclasses import replace

import pytest
import torch

from halfstep import formats
from halfstep.errors import CheckpointError, LayoutError
from halfstep.layouts import fitting, get_layout, list_layouts
from halfstep.layouts.folder import dtype_of, size_of
from halfstep.ops.operand import stored
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import get_recipe, list_recipes
from tiny import assert_same


def quantizers():
    """Every recipe's weight quantizer, those of the block formats, and others."""
    rules = [rule.linear.output.rhs for name in list_recipes() for rule in get_recipe(name).rules]
    found = [q.plain for q in rules if q is not None]
    found += [get_quantizer(name) for name in formats.block_names()]
    e4m3 = formats.get("e4m3fn")
    tiles = [(0, 0), (1, 0), (128, 128), (64, 64), (1, 256), (256, 256), (16, 32), (0, 1)]
    rules = ["absmax", "absmax_bf16", "rceil", "current", "fixed", "three_quarters"]
    found += [Quantizer(e4m3, scales=Scales(Tile(*tile), get_scaling(rule))) for tile in tiles for rule in rules]
    found += [replace(get_quantizer("nvfp4", scale=rule)) for rule in ("two_level_up", "four_over_six")]
    return [*dict.fromkeys(found)]


PAIRS = [
    (layout, quantizer)
    for layout in list_layouts()
    for quantizer in quantizers()
    if get_layout(layout).refusal(quantizer) is None
]


def matrix(rows, columns):
    """Values of many magnitudes, with a tile of zeros and a row of one sign."""
    torch.manual_seed(0)
    x = torch.randn(rows, columns) * torch.logspace(-6, 2, rows)[:, None] * torch.logspace(0, 3, columns)
    x[: min(rows, 128), : min(columns, 128)] = 0
    x[-1] = -x[-1].abs()
    return x


E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decoded_values(tensors, layout, shape):
    """The values of a layout's tensors, decoded from its documentation without halfstep's functions."""
    rows, columns = shape
    if "weight_packed" in tensors:
        packed = tensors["weight_packed"].long()
        codes = E2M1[torch.stack([packed & 15, packed >> 4], -1).view(rows, columns)]
    else:
        codes = tensors["weight"].float()
    scale = next(tensors[name] for name in ("weight_scale", "weight_scale_inv") if name in tensors)
    scale = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    if "weight_global_scale" in tensors:
        scale = scale / tensors["weight_global_scale"].double()
    tile = layout.tile
    scale = scale.view(layout.tile.grid(rows, columns))
    scale = scale.repeat_interleave(tile.rows or rows, 0)[:rows].repeat_interleave(tile.columns or columns, 1)
    return codes.double() * scale[:, :columns]


@pytest.mark.quick("shape1")
@pytest.mark.parametrize("shape", [(128, 256), (384, 128), pytest.param((256, 640), marks=pytest.mark.slow)])
def test_values_and_codes_roundtrip(shape):
    """Equal bit for bit, or for two-level scales up to the rounding of a reciprocal."""
    assert len(PAIRS) > 40
    for name, quantizer in PAIRS:
        layout = get_layout(name)
        made = stored(matrix(*shape), quantizer)
        tensors = layout.tensors(made)
        assert set(tensors) == set(layout.parts)
        values, ours = decoded_values(tensors, layout, shape), made.dequantize(torch.float64)
        if name == "nvfp4":
            torch.testing.assert_close(values, ours, rtol=2.0**-22, atol=0)
        else:
            assert torch.equal(values, ours), (name, str(quantizer.scales))
        again = layout.quantized(tensors, made.quantizer, shape, made.dtype, layout.scales.note(made))
        assert_same(again.tensors, made.tensors)


def test_unsupported_quantizers_are_refused_with_a_reason():
    words = {
        ("fp8-tensor", "fp8_128x128"): r"its tile \(128x128\) is not made of whole tiles of whole tensor",
        ("fp8-block", "fp8_1x128"): r"its tile \(1x128\) is not made of whole tiles of 128x128",
        ("mxfp8", "fp8_128x128"): r"its scales \(absmax, 128x128\)|its scales \(absmax\) are not powers of two",
        ("mxfp4", "mxfp8_e4m3"): r"values of float8_e4m3fn are not all values of float4_e2m1fn",
        ("fp8-channel", "mxfp8_e5m2"): r"values of float8_e5m2 are not all values of float8_e4m3fn",
        ("fp8-channel", "nvfp4"): r"are not float32 numbers, one a tile",
        ("nvfp4", "mxfp4"): r"are not E4M3 numbers beside one of the tensor",
    }
    for (layout, quantizer), why in words.items():
        found = get_layout(layout).refusal(get_quantizer(quantizer))
        assert found is not None
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(found)
    plain = Quantizer(formats.get("e4m3fn"))
    assert get_layout("nvfp4").refusal(Quantizer(formats.get("e2m1fn"))) is not None
    assert [layout.name for layout in fitting((plain,))] == [
        "fp8-tensor", "fp8-channel", "fp8-block", "deepseek-fp8", "mxfp8",
    ]  # fmt: skip
    assert get_layout("fp8-channel").refusal(replace(get_quantizer("llm_int8"))) is not None


def test_tensors_of_wrong_shapes_raise():
    layout, quantizer = get_layout("mxfp8"), get_quantizer("mxfp8")
    made = stored(matrix(128, 256), quantizer)
    tensors = layout.tensors(made)
    for name, wrong in (("weight", tensors["weight"][:1]), ("weight_scale", tensors["weight_scale"].float())):
        with pytest.raises(LayoutError, match=rf"{name}: .* found; mxfp8 of a 128x256 matrix has"):
            layout.quantized({**tensors, name: wrong}, quantizer, (128, 256), torch.float32, None)
    with pytest.raises(LayoutError, match=r"weight_scale: nothing found"):
        layout.quantized({"weight": tensors["weight"]}, quantizer, (128, 256), torch.float32, None)
    with pytest.raises(LayoutError, match=r"mxfp8 does not hold float8_e4m3fn \(absmax, 128x128\)"):
        layout.quantized(tensors, get_quantizer("fp8_128x128"), (128, 256), torch.float32, None)
    nv, two = get_layout("nvfp4"), get_quantizer("nvfp4")
    found = stored(matrix(128, 256), two)
    with pytest.raises(LayoutError, match=r"expected one to be the reciprocal of the other"):
        nv.quantized(nv.tensors(found), two, (128, 256), torch.float32, "0x1p0")


def test_scale_that_is_no_power_of_two_raises():
    """A float32 scale edited to 3, where the quantizer's are powers of two."""
    layout, quantizer = get_layout("fp8-block"), get_quantizer("fp8_128x128", scale="rceil")
    tensors = layout.tensors(stored(matrix(128, 256), quantizer))
    tensors["weight_scale"][0, 0] = 3
    with pytest.raises(LayoutError, match=r"a scale is no power of two from 2\^-127 to 2\^127"):
        layout.quantized(tensors, quantizer, (128, 256), torch.float32, None)


def test_sizes_and_dtypes_are_parsed():
    assert [size_of(text) for text in ("5GB", "300 MB", "7", 7, "2kb", "9B")] == [5 * 10**9, 3 * 10**8, 7, 7, 2000, 9]
    for wrong in ("5GiB", "", "-1", 0, "GB", 1.5):
        with pytest.raises(CheckpointError, match=r"expected a number of bytes, or one such as 5GB"):
            size_of(wrong)
    assert dtype_of("bf16") is dtype_of("bfloat16") is dtype_of(torch.bfloat16) is torch.bfloat16
    with pytest.raises(CheckpointError, match=r"dtype 'int8' found; expected one of fp32, bf16, fp16, float32"):
        dtype_of("int8")
