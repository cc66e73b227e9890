"""Every recipe on two threads, with tensors of several chunks, for which kernels are compiled differently."""

import pytest
import torch
from torch import nn

from tiny import EVERY, SMOOTH, Gated, prepared


WIDTH, ROWS = 160, 128  # 20,480 activations and 25,600 weights; a chunk has 16,384 elements


def trained(name, threads):
    torch.manual_seed(0)
    middle = Gated(WIDTH, WIDTH) if name in SMOOTH else nn.GELU()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))
    model, optimizer, scaler = prepared(name, model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(before)
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_losses_on_two_threads_equal_one_thread(name):
    """Torch's own matmuls may sum in another order."""
    assert trained(name, 2) == pytest.approx(trained(name, 1), rel=1e-3)
