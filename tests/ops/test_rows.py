"""Rows of 4 bits with a scale each: in which dtype they are carried."""

import torch

from halfstep import get_recipe
from halfstep.ops.operand import rounded_rows


def test_a_row_of_zeros_leaves_an_operand_in_16_bits():
    quantizer = get_recipe("fp4-wang-msamp").rules[-1].linear.output.lhs.plain
    x = torch.ones(4, 8)
    x[2] = 0
    assert rounded_rows(x, quantizer, None, torch.bfloat16, None)[0].dtype == torch.bfloat16
    x[2] = 2.0**-127  # subnormal in bfloat16, which CPUs' matrix units take for 0
    assert rounded_rows(x, quantizer, None, torch.bfloat16, None)[0].dtype == torch.float32
