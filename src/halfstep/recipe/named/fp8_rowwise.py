"""FP8 with one power-of-two scale a row along each matmul's shared dimension."""

from halfstep import formats
from halfstep.quant import ROW, TENSOR, Quantizer, Scales, get_scaling
from halfstep.recipe import KEEP, LinearSpec, Matmul, Recipe, Rule, linear_spec


_row, _tensor = (Quantizer(formats.get("e4m3fn"), scales=Scales(tile, get_scaling("rceil"))) for tile in (ROW, TENSOR))
_NOTE = "torchao takes an amax below 1e-12 for 1e-12; here the scale follows it down to 2^-127."

fp8_rowwise = Recipe(
    name="fp8-rowwise",
    summary="E4M3 everywhere, one power-of-two scale a row, rounded up so that nothing saturates.",
    source="torchao float8, recipe rowwise (round_scales_to_power_of_2)",
    compute="bf16",
    rules=(*KEEP, Rule("*", linear_spec(input=_row, weight=_row, grad_output=_row))),
    notes=(_NOTE,),
)

fp8_rowwise_gw_hp = Recipe(
    name="fp8-rowwise-gw-hp",
    summary="fp8-rowwise whose weight gradients come from unrounded operands; dx takes the weight with one scale.",
    source="torchao float8, recipe rowwise_with_gw_hp",
    compute="bf16",
    rules=(*KEEP, Rule("*", LinearSpec(output=Matmul(_row, _row), grad_input=Matmul(_row, _tensor)))),
    notes=(_NOTE,),
)
