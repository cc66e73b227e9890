"""torch.compile sees each kernel as one opaque operator, with the eager results."""

import itertools

import pytest
import torch

import halfstep
from families import in_turn, slow_unless
from halfstep import formats
from halfstep.formats import Codebook, Float
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from oracles.numbers import same_bits


# torch instantiates autograd functions as it traces them
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
OWN = Float("float8_e4m3fn", 3, 3, 1, source="not the one of that name")
NF4 = formats.get("nf4")
THIRDS = Codebook("thirds", (-1.0, -1 / 3, 1 / 3, 1.0), source="made up")


@pytest.fixture(autouse=True)
def _anew():
    """Reset torch.compile, since one code object is compiled for many formats here."""
    torch.compiler.reset()


FORMATS = ["e4m3fn", "posit8_2", "fp32", "int8", "e8m0", formats.get("nf4"), OWN, THIRDS]
BACKENDS = ["aot_eager", "eager"]


@pytest.mark.parametrize(
    ("format", "backend"),
    slow_unless(in_turn(FORMATS, BACKENDS).__contains__, itertools.product(FORMATS, BACKENDS)),
    ids=str,
)
def test_scalar_formats_compile_to_one_graph(format, backend):
    def step(x):
        return halfstep.round_to(x * 2, format, "toward_zero") + 1

    same_bits(torch.compile(step, fullgraph=True, backend=backend)(X), step(X))


@pytest.mark.quick("nf4", "uint4_64")
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "nf4", "fp8_128x128", "int8_row", "llm_int8", "uint4_64"])
def test_block_formats_compile_to_one_graph(format):
    quantizer = halfstep.get_quantizer(format)

    def step(x):
        return halfstep.ops.fake_quantize(x * 2, quantizer) + 1

    same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(X), step(X))


def test_a_block_formats_name_compiles_to_one_graph():
    def step(x):
        return halfstep.round_to(x * 2, "mxfp4", scale="even", dtype=torch.bfloat16) + 1

    same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(X), step(X))


def test_a_custom_block_format_compiles_to_one_graph():
    quantizer = Quantizer(THIRDS, scales=Scales(Tile(1, 8), get_scaling("absmax")))

    def step(x):
        return halfstep.ops.fake_quantize(x * 2, quantizer)

    same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(X), step(X))


@pytest.mark.quick("9223372036854775813")
@pytest.mark.parametrize("seed", [5, 2**63 + 5, 2**64 - 1])
def test_seeded_stochastic_rounding_compiled_equals_eager(seed):
    def step(x):
        return halfstep.round_to(x, "e4m3fn", "stochastic", generator=seed)

    same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(X), step(X))


def test_unseeded_stochastic_rounding_compiled_draws_from_the_generator():
    def step(x):
        return halfstep.round_to(x, "e4m3fn", "stochastic")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    first, second = compiled(X), compiled(X)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    first = compiled(X)
    torch.manual_seed(3)
    same_bits(step(X), first)


def test_format_keys_restore_the_format():
    for name in formats.names():
        format = formats.get(name)
        twin = formats.from_key(format.key)
        assert type(twin) is type(format)
        if format.bits <= 16:
            assert twin.values() == format.values()
            assert twin.boundaries() == format.boundaries()
        assert twin.key == format.key
    assert formats.from_key(OWN.key).max == OWN.max
