"""Products whose operands are rounded to bfloat16 toward zero."""

from halfstep import formats
from halfstep.quant import Quantizer
from halfstep.recipe.products import LinearSpec, Matmul
from halfstep.recipe.rule import Rule
from halfstep.recipe.spec import Recipe


_truncate = Quantizer(formats.get("bf16"), "toward_zero")
_product = Matmul(_truncate, _truncate)

bf16_truncate = Recipe(
    name="bf16-truncate",
    summary="bf16-mixed whose products' operands are rounded toward zero: a shrink of 0.3 % in each, all one way.",
    source="the rounding question of Kalamkar et al. 2019, arXiv 1905.12322",
    compute="bf16",
    rules=(Rule("*", LinearSpec(_product, _product, _product)),),
)
