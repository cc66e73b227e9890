"""Which calls Triton's casts take, asked without a GPU; that they are right is `tests/gpu`."""

from unittest.mock import Mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import halfstep
from families import for_each
from halfstep import formats
from halfstep.cli.diagnosis import gpu_path
from halfstep.kernels.gpu import cast, here, is_dense
from halfstep.ops import amax_of, casts
from halfstep.quant.cast import CONTAINERS


NEAREST = "nearest_even", "saturate", None


@pytest.fixture
def launches(monkeypatch):
    """Launches that compute nothing: what is asked of a call without a GPU is asked."""
    monkeypatch.setattr(cast, "launch", Mock())
    monkeypatch.setattr(cast, "functions", Mock())


def of(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


def test_kernels_of_a_gpu_take_no_tensor_of_a_cpu(launches):
    x, out, e4m3 = torch.zeros(4), torch.zeros(4), formats.get("e4m3fn")
    codes = torch.zeros(4, dtype=torch.uint8)
    assert cast.run(x, out, e4m3, *NEAREST)
    assert cast.run_codes(x, codes, e4m3, *NEAREST)
    assert cast.run_decode(codes, out, e4m3)
    assert is_dense(x)
    assert not here(x)
    assert cast.instruction(e4m3, "nearest_even", "saturate", x.device) is None


def test_what_the_result_does_not_hold_is_left_to_the_reference(launches):
    fp16 = formats.get("fp16")
    assert cast.run(of(4), of(4, dtype=torch.float32), fp16, *NEAREST)
    assert not cast.run(of(4, dtype=torch.float32), of(4), fp16, *NEAREST)  # fp16's fraction is no bf16's
    assert not cast.run(of(4), of(5), fp16, *NEAREST)
    assert not cast.run(of(4), of(4), formats.get("posit8_2"), *NEAREST)


def test_packed_rows_are_those_that_fill_their_bytes(launches):
    for name, columns, width in (("e2m1fn", 6, 3), ("e3m2fn", 8, 6)):
        format = formats.get(name)
        x, codes = of(5, columns), of(5, width, dtype=torch.uint8)
        assert cast.run_codes(x, codes, format, *NEAREST, packed=True)
        assert cast.run_decode(codes, x, format, packed=True)
        assert cast.run_codes(of(5, columns - 1), codes, format, *NEAREST, packed=True) is None
    assert cast.run_codes(x, of(5, 8, dtype=torch.uint8), formats.get("e4m3fn"), *NEAREST, packed=True) is None


@for_each("name", formats.names())
def test_codes_of_sixteen_bits_at_most_are_decoded(name, launches):
    format = formats.get(name)
    stored = of(4, dtype=CONTAINERS[format.storage_bits])
    assert (cast.run_decode(stored, of(4), format) is not None) == (format.bits <= 16)


def test_a_tensor_without_values_is_traced_on_a_gpu():
    with FakeTensorMode():
        x = torch.empty(6, 8, device="cuda")
        made = halfstep.quantize(x, halfstep.get_quantizer("float8_e4m3fn"))
        results = [
            halfstep.round_to(x, "e4m3fn"),
            halfstep.encode(x, "e4m3fn"),
            made.dequantize(),
            casts.round_scaled(x, x.new_empty(()), formats.get("e4m3fn"), "nearest_even", torch.bfloat16),
        ]
        assert {(result.device.type, tuple(result.shape)) for result in results} == {("cuda", (6, 8))}
        assert amax_of(x).device.type == "cuda"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("float8_e4m3fn", "float8_e4m3fn by kernel"),
        ("posit8_2", "posit8_2 by kernel"),
        (formats.get("nf4"), "nf4 by reference: no kernel for the format"),
    ],
)
def test_doctor_says_which_casts_have_a_kernel_on_a_gpu(name, path):
    assert gpu_path(halfstep.get_quantizer(name)) == path
