"""Every recipe computes the same bits whatever torch's default dtype is: Hugging Face loads models under another."""

import pytest
import torch

from tiny import EVERY, assert_same, batch, copied, model_for, prepared, train


QUICK = {"fp4-wang", "fp4-zhou-dgrad-bf16", "mxfp4-rht", "nvfp4"}
"""Those that once took another's buffers, and made other bits, for it; a recipe takes 0.3 s."""


def trained(name, dtype):
    """All that two steps leave, of a model in float32, under that default."""
    model, data = model_for(name), batch()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        setup = prepared(name, model)
        losses, output = train(*setup, 2, data), model(data[0])
    finally:
        torch.set_default_dtype(torch.float32)
    return losses, output.detach(), *(copied(each.state_dict()) for each in setup)


@pytest.mark.quick(*(f"{name}-torch.bfloat16" for name in sorted(QUICK)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_the_default_dtype_moves_no_bit(name, dtype):
    assert_same(trained(name, dtype), trained(name, torch.float32))
