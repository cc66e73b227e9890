"""Moments and weights in every form of one scale a tensor that kernels know, stepped: `interpreted.py` runs it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from halfstep import formats
from halfstep.kernels.selftest import Case
from halfstep.optim import selftest_gpu
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import Codes, Recipe, get_recipe, get_storage


PAIRS = (("e4m3", "e5m2"), ("e4m3fnuz", "float8_e4m3fn"), ("e3m4", "e5m2fnuz"))
"""Formats of the first moment and the second."""


def tests() -> Iterator[tuple[str, str, Callable[[str], Iterator[Case]]]]:
    """As `selftest_gpu.tests`: a kernel, words and what yields the cases."""
    for name, recipe in _recipes():
        yield "fuzzed moments", name, partial(selftest_gpu.stepped_by, recipe, torch.device("cpu"))


def _recipes() -> Iterator[tuple[str, Recipe]]:
    plain = get_recipe("fp32")
    for first, second in PAIRS:
        for rule in ("current", "absmax"):
            moments = (("exp_avg_sq", _stored(second, rule)), ("exp_avg", _stored(first, rule)))
            yield f"{first} and {second}, {rule}", replace(plain, moments=moments)
    for weight, grad, master in (
        ("float8_e5m2", "float8_e5m2", "fp32"), ("float8_e4m3fn", "float8_e4m3fn", None), ("fp16", "fp16", "bf16"),
    ):  # fmt: skip
        kept = None if master is None else get_storage(master)
        codes = Codes(_stored(weight, "rceil"), _stored(grad, "rceil"), kept)
        yield (
            f"weights in {weight}, gradients in {grad}, masters in {master}",
            replace(get_recipe("fp8lm-o1"), codes=codes),
        )


def _stored(format: str, rule: str):
    return get_storage(Quantizer(formats.get(format), scales=Scales(TENSOR, get_scaling(rule))))
