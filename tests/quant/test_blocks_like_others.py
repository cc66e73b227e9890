"""Block formats compared with torchao, bitsandbytes and gfloat; intended differences are asserted."""

import warnings

import gfloat
import gfloat.formats as gf
import numpy as np
import pytest
import torch

from halfstep import formats
from halfstep.quant import get_quantizer, round_to
from oracles.numbers import same_bits


pytest.importorskip("torchao", reason="torchao is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # both warn of what else could be installed
    import bitsandbytes.functional as bnb
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

MX = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e3m2": DTYPE_FP6_E3M2,
    "mxfp6_e2m3": DTYPE_FP6_E2M3,
    "mxfp4": torch.float4_e2m1fn_x2,
}
GFLOAT = {
    "mxfp8_e4m3": gf.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": gf.format_info_mxfp8_e5m2,
    "mxfp6_e3m2": gf.format_info_mxfp6_e3m2,
    "mxfp6_e2m3": gf.format_info_mxfp6_e2m3,
    "mxfp4": gf.format_info_mxfp4_e2m1,
}
RULES = {rule: getattr(ScaleCalculationMode, rule.upper()) for rule in ("floor", "ceil", "even", "rceil")}


def samples(rows=64, columns=256, dtype=torch.float32):
    """Rows of different magnitudes, with blocks at thresholds of the scale rules among them."""
    x = torch.randn(rows, columns) * 2.0 ** torch.randint(-30, 30, (rows, 1))
    x[0, :32] = torch.tensor(1.75).where(torch.arange(32) == 3, torch.tensor(0.5))
    x[1, :32] = torch.tensor(448.0).where(torch.arange(32) == 3, torch.tensor(1.0))
    x[2, :32] = torch.tensor(449.0).where(torch.arange(32) == 3, torch.tensor(1.0))
    x[3, :32] = torch.tensor(6.0).where(torch.arange(32) == 3, torch.tensor(1.0))
    x[4, :32] = torch.tensor(7.0).where(torch.arange(32) == 3, torch.tensor(-0.0))
    x[5, :32] = 0
    return x.to(dtype)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mx_blocks_equal_torchaos(name, rule, dtype):
    """Scales and codes are torchao's; its 6-bit codes take a byte each."""
    x = samples(dtype=dtype)
    scale, codes = to_mx(x, MX[name], 32, RULES[rule])
    ours = get_quantizer(name, scale=rule).quantize(x)
    zero = (x.view(64, 8, 32) == 0).all(-1)
    torch.testing.assert_close(ours.scale[~zero], scale.view(torch.uint8)[~zero], rtol=0, atol=0)
    codes = codes.view(torch.uint8)
    if name.startswith("mxfp6"):
        element = formats.get_block(name).element
        values = torch.tensor([element.decode(c) for c in range(64)])[codes.long()]
        power = torch.exp2(ours.scale.double() - 127).repeat_interleave(32, 1)
        same_bits(ours.dequantize(torch.float64), values.double() * power)
    else:
        torch.testing.assert_close(ours.codes, codes, rtol=0, atol=0)


def test_nan_and_infinity_in_mx_blocks_beside_torchao():
    """NaN makes the block NaN in both; an infinity does here, and counts as 2^128 (floor) or the largest value (rceil)
    in torchao."""
    x = torch.randn(4, 32)
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    for rule, infinite in (("floor", 128 - 8 + 127), ("rceil", 254)):
        scale, _ = to_mx(x, torch.float8_e4m3fn, 32, RULES[rule])
        ours = get_quantizer("mxfp8_e4m3", scale=rule).quantize(x)
        assert scale.view(torch.uint8)[:3, 0].tolist() == [255, infinite, infinite]
        assert ours.scale[:3, 0].tolist() == [255, 255, 255]
        assert ours.scale[3] == scale.view(torch.uint8)[3]


@pytest.mark.parametrize("name", GFLOAT)
def test_mx_blocks_equal_gfloats(name):
    """Decoded blocks, with the OCP scale rule."""
    x = samples(8, 64)
    x[5] = 1.0  # gfloat gives a block of zeros the scale 2^-127 too, but by its own rule
    ours = get_quantizer(name)(x)
    info = GFLOAT[name]
    for row in range(8):
        for start in (0, 32):
            block = x[row, start : start + 32].double().numpy()
            theirs = gfloat.quantize_block(info, block, gfloat.compute_scale_amax)
            same_bits(ours[row, start : start + 32].double(), torch.from_numpy(np.asarray(theirs)))


def test_nvfp4_agrees_with_torchao_in_the_middle_of_the_range():
    """Scales are equal; codes are equal but for quotients one rounding apart (torchao multiplies by a reciprocal,
    halfstep divides)."""
    x = torch.randn(128, 256)
    tensor_scale = x.abs().max() / (448 * 6)
    scale, codes = nvfp4_quantize(x, per_tensor_scale=tensor_scale)
    ours = get_quantizer("nvfp4").quantize(x)
    same_bits(ours.tensors["tensor_scale"], tensor_scale)
    torch.testing.assert_close(ours.scale, scale.view(torch.uint8).view(128, 16), rtol=0, atol=0)
    differ = (ours.codes != codes.view(torch.uint8)).double().mean().item()
    assert differ < 1e-4


def test_only_torchao_clamps_the_block_scales_of_nvfp4_from_below():
    """torchao clamps at 2^-6, the smallest normal of e4m3fn: blocks 2^-15 below the largest lose what halfstep
    keeps."""
    x = torch.randn(2, 16).clamp(-1, 1)
    x[0, 0] = 1.0
    x[1] *= 2.0**-14
    x[1, 0] = 2.0**-14
    scale, _ = nvfp4_quantize(x, per_tensor_scale=x.abs().max() / (448 * 6))
    ours = get_quantizer("nvfp4").quantize(x)
    assert scale.float().flatten().tolist() == [448.0, 448 * 2.0**-14]
    x[1] *= 2.0**-3
    scale, _ = nvfp4_quantize(x, per_tensor_scale=x.abs().max() / (448 * 6))
    ours = get_quantizer("nvfp4").quantize(x)
    assert scale.float().flatten().tolist() == [448.0, 2.0**-6]
    assert formats.get("e4m3fn").decode(int(ours.scale[1, 0])) == 2.0**-8
    error = (ours.dequantize() - x)[1].norm() / x[1].norm()
    assert error < 0.15


@pytest.mark.parametrize("name", ["nf4", "bnb_fp4"])
def test_4_bit_tables_equal_bitsandbytes(name):
    theirs = bnb.get_4bit_type(name.removeprefix("bnb_"), device="cpu")
    assert [formats.get(name).decode(c) for c in range(16)] == theirs.double().tolist()


def test_bitsandbytes_lists_af4_in_descending_order():
    theirs = bnb.get_4bit_type("af4", device="cpu")
    assert [formats.get("af4").decode(c) for c in range(16)] == theirs.flip(0).double().tolist()


@pytest.mark.parametrize(("name", "signed"), [("dynamic8", True), ("dynamic8_unsigned", False)])
def test_dynamic_codebooks_equal_bitsandbytes(name, signed):
    theirs = bnb.create_dynamic_map(signed=signed).double().tolist()
    assert [formats.get(name).decode(c) for c in range(256)] == theirs


@pytest.mark.parametrize("name", ["nf4", "bnb_fp4"])
def test_4_bit_blocks_agree_with_bitsandbytes(name):
    """absmax is equal, codes are equal but for values next to a boundary: bitsandbytes multiplies by 1 / absmax,
    halfstep divides."""
    x = torch.randn(64, 256)
    codes, state = bnb.quantize_4bit(x, quant_type=name.removeprefix("bnb_"), blocksize=64)
    ours = get_quantizer(name).quantize(x)
    same_bits(ours.scale.flatten(), state.absmax)
    differ = (ours.codes.flatten() != codes.flatten()).double().mean().item()
    assert differ < (1e-3 if name == "nf4" else 2e-2)
    back = bnb.dequantize_4bit(codes, state)
    off = (ours.dequantize() != back).double().mean().item()
    assert off < 1e-3


def test_boundaries_of_nf4_agree_with_bitsandbytes():
    """The constants of its encoder are the midpoints, rounded to float32; exactly there it takes the lower value."""
    cuts = formats.get("nf4").boundaries()
    for constant in (0.8614784, 0.6427869, 0.0397901, -0.8480964):
        assert min(abs(c - constant) for c in cuts) < 1e-7
    x = torch.tensor([c for c in cuts if float(np.float32(c)) == c])
    assert len(x) > 3
    below = torch.tensor([max(v for v in formats.get("nf4").values() if v < c) for c in x.tolist()])
    same_bits(round_to(x, "nf4"), below)


def test_dynamic_blocks_agree_with_bitsandbytes():
    x = torch.randn(16, 256)
    theirs, state = bnb.quantize_blockwise(x, blocksize=256)
    ours = get_quantizer("dynamic8").quantize(x)
    same_bits(ours.scale.flatten(), state.absmax)
    assert (ours.codes.flatten() != theirs.flatten()).double().mean().item() < 2e-2
    assert (ours.dequantize() - bnb.dequantize_blockwise(theirs, state)).abs().max() < 0.05


def test_double_quantization_agrees_with_bitsandbytes():
    x = torch.randn(256, 256)
    theirs = bnb.dequantize_4bit(*bnb.quantize_4bit(x, quant_type="nf4", blocksize=64, compress_statistics=True))
    ours = get_quantizer("nf4", scale="double_absmax")(x)
    assert (ours != theirs).double().mean().item() < 2e-2
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)


def test_int8_rows_agree_with_bitsandbytes():
    x = torch.randn(32, 256).half()
    theirs, scale, _ = bnb.int8_vectorwise_quant(x)
    ours = get_quantizer("int8_row").quantize(x)
    torch.testing.assert_close(ours.scale.flatten() * 127, scale, rtol=1e-6, atol=0)
    assert (ours.codes.view(torch.int8) != theirs).double().mean().item() < 1e-2


def test_outlier_columns_equal_bitsandbytes():
    """The same columns; bitsandbytes counts their small elements in the row's amax, halfstep leaves whole columns
    out."""
    x = torch.randn(16, 64).half()
    x[3, 7], x[5, 60] = 9.0, -20.0
    _, _, columns = bnb.int8_vectorwise_quant(x, threshold=6.0)
    ours = get_quantizer("llm_int8").quantize(x)
    assert ours.tensors["outlier_columns"].tolist() == columns.tolist() == [7, 60]
    same_bits(ours.dequantize()[:, [7, 60]], x[:, [7, 60]])
