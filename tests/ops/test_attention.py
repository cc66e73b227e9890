"""Attention: torch's own where the machine has 16-bit matmuls for the dtype, else emulated in float32."""

import pytest
import torch
import torch.nn.functional as F

from halfstep import ops


pytestmark = pytest.mark.cpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(dtype=torch.float32, time=7):
    return [torch.randn(2, 3, time, 8, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_native_attention_equals_torchs_bit_for_bit(dtype, causal, carry):
    carry()
    q, k, v = operands(dtype)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.equal(ops.attention(q, k, v, is_causal=causal), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_emulated_attention_equals_float32_with_rounded_inputs_and_output(dtype, autocast, carry):
    carry(dtype)
    q, k, v = operands(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        y = ops.attention(q, k, v, is_causal=True)
    wide = [x.detach().to(dtype).float().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*wide, is_causal=True)
    assert y.dtype == dtype
    assert torch.equal(y, expected.to(dtype))
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad.float())
    for x, reference in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(x.grad, reference.grad.to(dtype).to(x.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_and_native_attention_agree_to_the_dtypes_precision(dtype, carry):
    results = []
    for kinds in ((), (dtype,)):
        carry(*kinds)
        torch.manual_seed(1)
        results.append(ops.attention(*operands(dtype), is_causal=True))
    torch.testing.assert_close(*results, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    assert results[0].dtype == results[1].dtype == dtype


def test_matmul_dispatches_to_the_emulated_one(carry):
    lhs, rhs, bias = torch.randn(5, 9).half(), torch.randn(9, 4).half(), torch.randn(4).half()
    carry(torch.float16)
    exact = lhs.double() @ rhs.double() + bias.double()
    torch.testing.assert_close(ops.matmul(lhs, rhs, bias).double(), exact, rtol=2**-11, atol=2**-11)
    assert torch.equal(ops.matmul(lhs, rhs), (lhs.float() @ rhs.float()).half())
    single = torch.randn(3, 3)
    assert torch.equal(ops.matmul(single, single), single @ single)
