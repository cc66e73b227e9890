"""Which scaled tiles the Triton kernels support, the layout of their scales, and random ones in the interpreter
(slow)."""

import pytest
import torch
from test_proofs import OLDEST, PINNED, assert_all_equal, json_lines

from families import for_each
from halfstep import formats
from halfstep.kernels.gpu import blocks, layouts, rotated
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.quantizer import layout
from halfstep.quant.scaling import get_scaling


UNSUPPORTED = {"affine"}
"""Rules without a kernel: zero points."""
META = torch.device("meta")


def test_every_block_format_is_supported_except_known_ones():
    found = {
        (name, rule)
        for name in formats.block_names()
        for rule in formats.get_block(name).rules
        if blocks.cut_of(torch.empty(128, 256, device=META), get_quantizer(name, scale=rule)) is None
    }
    left = {
        (name, rule) for name in formats.block_names() for rule in formats.get_block(name).rules if rule in UNSUPPORTED
    }
    assert found == left | {("llm_int8", "absmax")}


@for_each("shape", [(128, 256), (0, 256), (5, 13), (5, 14), (3, 4, 32), (7,), ()], ids=str)
def test_supported_shapes_can_be_decoded_too(shape):
    x = torch.empty(shape, device=META)
    named = ("mxfp8", "mxfp4", "mxfp6_e3m2", "nvfp4", "nf4", "dynamic8", "fp8_1x128", "fp8_128x128", "int8_row")
    for name, rule in (*((name, None) for name in named), ("nf4", "double_absmax")):
        quantizer = get_quantizer(name, scale=rule)
        sizes = layout(quantizer, shape, x.dtype).items()
        tensors = {key: torch.empty(size, dtype=dtype, device=META) for key, (dtype, size) in sizes}
        taken = blocks.cut_of(x, quantizer) is not None
        assert taken == (blocks.restored(tensors, x, quantizer) is not None), name
        whole = {4: 2, 6: 4}.get(quantizer.format.bits, 1)
        assert taken == bool(shape and x.numel() and shape[-1] % whole == 0), name


def test_unsupported_dtypes_tiles_and_layouts_are_refused():
    x, quantizer = torch.empty(128, 256, device=META), get_quantizer("mxfp8")
    assert blocks.cut_of(x.double(), quantizer) is None
    assert blocks.cut_of(x.t(), quantizer) is None
    for tile in (Tile(1, 48), Tile(256, 256), Tile(3, 1), Tile(0, 16), Tile(16, 0)):
        scales = Scales(tile, get_scaling("rceil"))
        assert blocks.cut_of(x, Quantizer(formats.get("e4m3fn"), scales=scales)) is None, tile
    directed = Quantizer(formats.get("e4m3fn"), "toward_zero", scales=Scales(Tile(1, 32), get_scaling("rceil")))
    assert blocks.cut_of(x, directed) is None


def test_four_over_six_needs_exact_sums_and_tiles_within_a_block():
    x, rule = torch.empty(128, 256, device=META), get_scaling("four_over_six")
    for format, tile, taken in (
        ("e2m1fn", Tile(1, 16), True),
        ("e2m1fn", Tile(16, 16), True),
        ("e2m1fn", Tile(1, 32), True),
        ("e2m1fn", Tile(1, 256), True),
        ("e2m1fn", Tile(128, 128), False),
        ("e2m1fn", Tile(1, 0), False),
        ("e4m3fn", Tile(1, 16), False),
        ("int4", Tile(1, 16), False),
    ):
        quantizer = Quantizer(formats.get(format), scales=Scales(tile, rule))
        assert (blocks.cut_of(x, quantizer) is not None) == taken, (format, tile)
        assert (layouts.constants(x, quantizer) is not None) == (taken and tile.columns == 16)
        found = rotated.constants(x, torch.empty(16, device=META), 1, quantizer)
        assert (found is not None) == (taken and tile == Tile(1, 16))


def test_stochastic_rounding_into_both_layouts_needs_shared_codes():
    x = torch.empty(128, 256, device=META)
    for name, shared in (("mxfp8", False), ("fp8_1x128", False), ("fp8_128x128", True), ("int8_tensor", True)):
        assert layouts.constants(x, get_quantizer(name)) is not None, name
        found = layouts.constants(x, get_quantizer(name, rounding="stochastic"))
        assert (found is not None) == shared, name
    assert layouts.constants(x, get_quantizer("mxfp8"), scale_given=True) is None
    found = layouts.constants(x, get_quantizer("int8_tensor"), scale_given=True)
    assert (found is not None) == formats.get("int8").has_nan
    assert (
        layouts.constants(torch.empty(5, 256, device=META), get_quantizer("mxfp4")) is None
    )  # 5 codes of 4 bits do not fill bytes


def test_scales_of_both_layouts_have_the_strides_of_tensor_cores():
    x = torch.empty(256, 384, device=META)
    along, turned = layouts.empty(x, get_quantizer("fp8_1x128"), outer=True)
    assert (along["scale"].shape, along["scale"].stride()) == ((256, 3), (1, 256))
    assert (turned["scale"].shape, turned["scale"].stride()) == ((384, 2), (1, 384))
    along, turned = layouts.empty(x, get_quantizer("mxfp8"), "swizzled")
    assert (along["scale"].numel(), turned["scale"].numel()) == (256 * 12, 384 * 8)
    along, _ = layouts.empty(x, get_quantizer("mxfp8"), "number")
    assert along["scale"].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(("version", "seed"), [(PINNED, 0), (PINNED, 1), (OLDEST, 2)])
def test_random_tiles_equal_the_reference_in_the_interpreter(version, seed):
    outcomes = json_lines("fuzzed_tiles.py", version, "--seed", str(seed), TRITON_INTERPRET="1")
    refused = [outcome for outcome in outcomes if outcome["difference"] == "the kernel took no input"]
    assert_all_equal([outcome for outcome in outcomes if outcome not in refused], version)
    assert len(refused) < len(outcomes) / 2
