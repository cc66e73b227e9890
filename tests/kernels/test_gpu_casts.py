"""Which calls the Triton casts accept, checked without a GPU; `tests/gpu` tests their results."""

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
    """Replace launches by mocks, so that calls are checked without a GPU."""
    monkeypatch.setattr(cast, "launch", Mock())
    monkeypatch.setattr(cast, "functions", Mock())


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


def test_casts_accept_dense_tensors_that_are_not_on_a_gpu_for_tests(launches):
    x, out, e4m3 = torch.zeros(4), torch.zeros(4), formats.get("e4m3fn")
    codes = torch.zeros(4, dtype=torch.uint8)
    assert cast.run(x, out, e4m3, *NEAREST)
    assert cast.run_codes(x, codes, e4m3, *NEAREST)
    assert cast.run_decode(codes, out, e4m3)
    assert is_dense(x)
    assert not here(x)
    assert cast.instruction(e4m3, "nearest_even", "saturate", x.device) is None


def test_unsupported_outputs_are_refused(launches):
    fp16 = formats.get("fp16")
    assert cast.run(empty(4), empty(4, dtype=torch.float32), fp16, *NEAREST)
    assert not cast.run(
        empty(4, dtype=torch.float32), empty(4), fp16, *NEAREST
    )  # bf16 cannot represent fp16's mantissa
    assert not cast.run(empty(4), empty(5), fp16, *NEAREST)
    assert not cast.run(empty(4), empty(4), formats.get("posit8_2"), *NEAREST)


def test_packed_codes_need_rows_that_fill_their_bytes(launches):
    for name, columns, width in (("e2m1fn", 6, 3), ("e3m2fn", 8, 6)):
        format = formats.get(name)
        x, codes = empty(5, columns), empty(5, width, dtype=torch.uint8)
        assert cast.run_codes(x, codes, format, *NEAREST, packed=True)
        assert cast.run_decode(codes, x, format, packed=True)
        assert cast.run_codes(empty(5, columns - 1), codes, format, *NEAREST, packed=True) is None
    assert cast.run_codes(x, empty(5, 8, dtype=torch.uint8), formats.get("e4m3fn"), *NEAREST, packed=True) is None


@for_each("name", formats.names())
def test_codes_of_at_most_16_bits_are_decoded(name, launches):
    format = formats.get(name)
    stored = empty(4, dtype=CONTAINERS[format.storage_bits])
    assert (cast.run_decode(stored, empty(4), format) is not None) == (format.bits <= 16)


def test_fake_tensors_on_a_gpu_are_traced():
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
def test_doctor_names_the_casts_with_a_kernel_on_a_gpu(name, path):
    assert gpu_path(halfstep.get_quantizer(name)) == path
