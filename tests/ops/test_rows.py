"""The dtype in which 4-bit rows with one scale each are emulated."""

import torch

from halfstep import get_recipe
from halfstep.ops.operand import rounded_rows


def test_rows_are_bf16_unless_one_is_subnormal():
    quantizer = get_recipe("fp4-wang-msamp").rules[-1].linear.output.lhs.plain
    x = torch.ones(4, 8)
    x[2] = 0
    assert rounded_rows(x, quantizer, None, torch.bfloat16, None)[0].dtype == torch.bfloat16
    x[2] = 2.0**-127  # subnormal in bfloat16, which CPUs' matmuls flush to zero
    assert rounded_rows(x, quantizer, None, torch.bfloat16, None)[0].dtype == torch.float32
