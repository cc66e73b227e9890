"""Rotary positions in a check, against complex numbers, and against what holds exactly before anything is rounded."""

import pytest
import torch

from halfstep.claims.checks import rounding


@pytest.mark.parametrize("start", [0, 5, 4096])
def test_a_pair_is_turned_as_a_complex_number_is(start):
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rates = 10_000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    angles = (start + torch.arange(7, dtype=torch.float64))[:, None] * rates
    turned = torch.complex(x[:, :64], x[:, 64:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rounding._rotated(x, start), torch.cat([turned.real, turned.imag], 1))


def test_logits_do_not_move_where_the_text_does_not_and_hardly_without_rounding():
    assert rounding._moved(33, 0, "bf16") == 0
    assert rounding._moved(33, 16, "fp32") < 1e-6 < rounding._moved(33, 16, "fp16") < rounding._moved(33, 16, "bf16")
