"""Recipes with a number in their name: `bits-e8m3`, bf16 training with 3 mantissa bits, and `weights-int4`."""

from __future__ import annotations

import re

from halfstep import formats
from halfstep.errors import RecipeError
from halfstep.formats import Integer
from halfstep.quant import ROW, Quantizer, Scales, get_scaling
from halfstep.recipe.products import LinearSpec, Matmul
from halfstep.recipe.rule import KEEP, Rule
from halfstep.recipe.spec import Recipe


_NAME = re.compile(r"bits-e(\d+)m(\d+)(-nearest)?")
_WEIGHTS = re.compile(r"weights-int(\d+)")
_SOURCE = "Lee et al. 2024, arXiv 2405.18710; which operands they mask, and where, is not said in what was read of it"


def is_partial(name: str) -> bool:
    """Whether that is the name of such a recipe, be its bits possible or not."""
    return _NAME.fullmatch(name) is not None or _WEIGHTS.fullmatch(name) is not None


def partial(name: str) -> Recipe:
    """The recipe of such a name.

    Raises:
        RecipeError: as `few_bits` and `integer_weights`.
    """
    if match := _WEIGHTS.fullmatch(name):
        return integer_weights(int(match[1]))
    return few_bits(name)


def integer_weights(bits: int) -> Recipe:
    """The recipe `weights-intN`: fp32 training whose forward sees every weight but the head's in N bits.

    Integers from -(2^(N-1) - 1) on, with one scale a row (an output channel) from its largest magnitude; gradients are
    those of the rounded weights, and update the unrounded ones.

    Raises:
        RecipeError: fewer than 2 bits, or more than 12.
    """
    if not 2 <= bits <= 12:
        raise RecipeError(f"recipe 'weights-int{bits}': expected 2 to 12 bits, such as weights-int4")
    most = 2 ** (bits - 1) - 1
    source = "symmetric integers, as the absmax quantizers of Kumar et al. 2024, arXiv 2411.04330"
    row = Quantizer(Integer(f"int{bits}", -most, most, source=source), scales=Scales(ROW, get_scaling("absmax")))
    return Recipe(
        name=f"weights-int{bits}",
        summary=f"fp32 whose matmuls see weights of {bits} bits, a scale an output channel; the head's stay whole.",
        source="Kumar et al. 2024, arXiv 2411.04330, section 4",
        rules=(*KEEP, Rule("*", LinearSpec(output=Matmul(rhs=row), grad_input=Matmul(rhs=row.down)))),
    )


def few_bits(name: str) -> Recipe:
    """The recipe `bits-eXmY` or `bits-eXmY-nearest`: bf16 with X of its 8 exponent and Y of its 7 mantissa bits.

    Weights, activations and gradients are bf16, with an fp32 master. Every operand of every linear layer's matmuls,
    the head's included, then loses the bits: masked (rounded toward zero, as in the paper), or rounded to nearest,
    ties to even, as hardware does. Values beyond the range of fewer exponent bits saturate; there are no scales.
    `bits-e8m7` takes nothing away from a tensor in bf16; a model's float32 inputs are cut from float32.

    Raises:
        RecipeError: fewer than 2 or more than 8 exponent bits, or more than 7 mantissa bits.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    exponent, mantissa, nearest = int(match[1]), int(match[2]), match[3] is not None
    if not 2 <= exponent <= 8 or mantissa > 7:
        raise RecipeError(
            f"recipe {name!r}: bf16 has 8 exponent and 7 mantissa bits, of which some are taken away; expected e2 to "
            "e8 and m0 to m7, such as bits-e8m3"
        )
    operand = Quantizer(formats.get(f"e{exponent}m{mantissa}"), "nearest_even" if nearest else "toward_zero")
    product = Matmul(operand, operand)
    how = "rounded to nearest" if nearest else "the others masked"
    return Recipe(
        name=name,
        summary=f"bf16-master whose matmuls' operands have {exponent} exponent and {mantissa} mantissa bits, {how}.",
        source=_SOURCE,
        weights="bf16",
        master="fp32",
        compute="bf16",
        rules=(Rule("*", LinearSpec(product, product, product)),),
        notes=() if nearest else ("Masking shrinks every operand; -nearest tells the bits' effect from the bias's.",),
    )
