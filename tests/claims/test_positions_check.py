"""The rotary embedding of a check against complex numbers, and invariances that hold before rounding."""

import pytest
import torch

from halfstep.claims.checks import rounding


@pytest.mark.parametrize("start", [0, 5, 4096])
def test_rotation_equals_complex_multiplication(start):
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rates = 10_000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    angles = (start + torch.arange(7, dtype=torch.float64))[:, None] * rates
    turned = torch.complex(x[:, :64], x[:, 64:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rounding._rotated(x, start), torch.cat([turned.real, turned.imag], 1))


def test_logits_move_with_the_text_position_only_through_rounding():
    assert rounding._moved(33, 0, "bf16") == 0
    assert rounding._moved(33, 16, "fp32") < 1e-6 < rounding._moved(33, 16, "fp16") < rounding._moved(33, 16, "bf16")
