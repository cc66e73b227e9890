"""Optimizer steps with every per-tensor storage of moments and weights that kernels support, and norms whose summation
order shows: run by `interpreted.py`."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from halfstep import formats
from halfstep.kernels.arithmetic import norm
from halfstep.kernels.gpu.kinds import Tensors
from halfstep.kernels.gpu.optimizer import Steps
from halfstep.kernels.selftest.case import Case, KernelTest, kernel_tests
from halfstep.optim import selftest
from halfstep.optim.rules.elementwise import elementwise
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import Codes, Recipe, get_recipe, get_storage
from kernels.inputs import ORDERS, near_a_tie


PAIRS = (("e4m3", "e5m2"), ("e4m3fnuz", "float8_e4m3fn"), ("e3m4", "e5m2fnuz"))
"""Formats of the first and second moments."""


def tests() -> list[KernelTest]:
    """One test for each pair of formats, and one of norms."""
    kinds = [("ordinary",), ("wide",), ("hard",)]
    return [
        *kernel_tests("fuzzed moments", dict(_recipes()), selftest.stepped, kinds),
        KernelTest("norms", "their order", _orders),
    ]


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


def _orders(device: torch.device) -> Iterator[Case]:
    """Weights that step by their own norm, to 0 or to its last bit."""
    rule = elementwise(
        "made_up", torch.optim.SGD, lambda group: (), lambda w, grad, moments, o: (w - norm(w) * grad, {}),
        lambda group: {}, elementwise=False,
    )  # fmt: skip
    for places, expected in ORDERS[:4] + ORDERS[5:]:  # the other one has 8,000 blocks, which run sequentially here
        weight = near_a_tie(places)
        step, grad = torch.zeros(()), torch.ones_like(weight)
        tensors = Tensors(weight, grad, step, "none", {}, (), None, "nearest_even", None, 0, 0, 0)
        Steps([tensors], [rule.options({})]).run(None, None)
        yield Case(torch.tensor([1.0 - expected]), weight[:1].clone(), str(places))


def _stored(format: str, rule: str):
    return get_storage(Quantizer(formats.get(format), scales=Scales(TENSOR, get_scaling(rule))))
