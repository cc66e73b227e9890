"""Self-tests of optimizer kernels against the update rules: one tensor at a time on a CPU, many together on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from halfstep.kernels.gpu.kinds import Tensors
from halfstep.kernels.gpu.optimizer import Steps
from halfstep.kernels.selftest.case import Case, Cases, Run, hard, kernel_tests, named, scalar
from halfstep.ops import code_tensor
from halfstep.optim.classes import Lamb, Lion
from halfstep.optim.conversion import convert
from halfstep.optim.rules import no_fused_update
from halfstep.optim.rules.adam import adamw
from halfstep.optim.stepping import StepPlan
from halfstep.recipe import DTYPES, Recipe, get_recipe


_SIZES, _LARGE, _SCALE = (0, 1, 17, 1024, 4096 + 259), 17, 8.0
"""The sizes of the tensors of one launch: empty, few elements, one block, several and a remainder; the size from which
a recipe's codes are used; and the gradients' loss scale."""
_ADAMW = partial(torch.optim.AdamW, lr=1e-2)
_GRADIENTS: dict[str, Callable[[int, int], Tensor]] = {
    "ordinary": lambda size, step: _normal(size + 1, size) * 1e-3**step,
    "wide": lambda size, step: hard(size).nan_to_num(0.0).clamp(-1e15, 1e15) * 1e-3**step,
    "hard": lambda size, step: hard(size) * 1e-3**step,
    "hard, then ordinary": lambda size, step: _normal(size + 1, size) if step else hard(size),
}
"""Functions of (size, step) that return gradients, by kind: within the range of one scale of a tensor, and beyond."""


def stepped(
    recipe: Recipe, device: torch.device, kind: str, sizes: tuple[int, ...] = _SIZES, scaled: str = "scaled",
    make: Run = _ADAMW, way: str = "together",
) -> Cases:  # fmt: skip
    """Cases that compare weights and states after two steps by kernels with those by the update rule."""
    grads = [[_GRADIENTS[kind](size, step) for size in sizes] for step in range(2)]
    expected = _after(recipe, torch.device("cpu"), grads, scaled, make, "by the rule")
    found = _after(recipe, device, grads, scaled, make, way)
    yield from (Case(tensor, found.get(key), key) for key, tensor in expected.items())


def _after(
    recipe: Recipe, device: torch.device, grads: list[list[Tensor]], scaled: str, make: Run, way: str
) -> dict[str, Tensor]:
    """Weights and states, by name, after steps with these gradients: `way` is "by the rule", "by kernels" or
    "together". Empty if not all tensors were stepped "together"."""
    weights = [_normal(len(grad), len(grad)).to(device) for grad in grads[0]]
    parameters = [
        nn.Parameter(weight.to(DTYPES[recipe.weights], copy=True))
        if recipe.codes is None or len(weight) < _LARGE
        else code_tensor.parameter(
            code_tensor.CodeTensor.encode(weight, recipe.codes.weights.quantizer),
            grads=recipe.codes.grads.quantizer if recipe.codes.grads else None,
        )
        for weight in weights
    ]  # large ones are CodeTensors if the recipe stores rounded weights as codes
    copies = {p: w.clone() for p, w in zip(parameters, weights, strict=True)} if recipe.master or recipe.codes else {}
    others = {"params": parameters[1::2], "lr": 3e-3, "weight_decay": 0.0}  # a group with options of its own
    optimizer = convert(make([{"params": parameters[::2]}, others]), recipe, copies, 7)  # type: ignore[arg-type]
    if way == "by the rule":
        optimizer.rule = replace(optimizer.rule, fused=no_fused_update, options=None)
    elif way == "together":
        optimizer._together = StepPlan(anywhere=True)
    for number, step in enumerate(grads):
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.to(device, parameter.dtype)
            if isinstance(parameter, code_tensor.CodeTensor):
                code_tensor.round_gradient(parameter)
        for overflowed in (0.0, 1.0) if scaled and not number else (0.0,):  # the second moves nothing
            told = {"grad_scale": scalar(_SCALE, device), "found_inf": scalar(overflowed, device)} if scaled else {}
            vars(optimizer).update(told)  # as loss scalers set them
            optimizer.step()
        for parameter in parameters:
            parameter.detach()[::7] = 0.0  # as a mask would: masters must follow
    found: dict[str, Tensor] = {}
    for p in parameters:
        kept = p.parts if isinstance(p, code_tensor.CodeTensor) else {"weight": p.detach()}
        found |= {f"{key} of {len(p)}": t for key, t in {**kept, **optimizer.state[p]}.items() if torch.is_tensor(t)}
    return found if way != "together" or optimizer._together.all else {}


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def _parts(recipe: Recipe, device: torch.device, rows: slice, columns: slice, place: tuple[int, int, int]) -> Cases:
    """A case that steps a rank's shard of a tensor: stochastic rounding uses the noise of its elements in the whole."""
    whole = _normal(1, 40, 30, 20).bfloat16()
    parameter = nn.Parameter(whole.clone())
    optimizer = convert(_ADAMW([parameter]), recipe, {}, 7)
    optimizer.rule = replace(optimizer.rule, fused=no_fused_update, options=None)
    parameter.grad = whole.clone()
    optimizer.step()
    (group,) = optimizer.param_groups
    weight = whole[rows, columns].to(device, copy=True).contiguous()
    moments = torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(weight, dtype=torch.float32)
    tensors = Tensors(
        weight, weight.clone(), scalar(0.0, device), "none", {}, moments, None, "stochastic", place,
        group["rounding_seed"], 0, 0,
    )  # fmt: skip
    Steps([tensors], [adamw.options(group)]).run(None, None)  # type: ignore[misc]
    yield Case(parameter.detach()[rows, columns], weight)


CPU = kernel_tests(
    "adam",
    named(
        get_recipe, "fp32", "bf16-master", "bf16-stochastic", "bf16-split", "bf16-kahan", "bf16-collage-plus",
        "bf16-7byte", "fp16-pure",
    ),
    stepped, product(_GRADIENTS, ((0,), (1,), (17,), ((1 << 14) + 3,)), ("", "scaled")), way="by kernels",
)  # fmt: skip
_OTHERS = ("fp32", "bf16-master", "bf16-stochastic", "adamw-8bit")
_OPTIMIZERS: dict[str, tuple[tuple[str, ...], Run]] = {
    "adamw": (
        (
            "fp32", "bf16-master", "bf16-pure", "bf16-stochastic", "bf16-split", "bf16-kahan", "bf16-collage-light",
            "bf16-collage-plus", "bf16-7byte", "fp16-pure", "fp16-master", "fp8-adam", "adamw-8bit",
            "coat", "fp8-fishman", "fp8lm-o1", "fp8lm-o2", "fp8lm-o3",
        ),
        partial(_ADAMW, weight_decay=0.1),
    ),
    "adam": (_OTHERS, partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, maximize=True)),
    "sgd": (_OTHERS, partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1)),
    "nesterov": (("fp32",), partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)),
    "descent": (("fp32",), partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1)),
    "lion": (_OTHERS, partial(Lion, lr=1e-2, weight_decay=0.1)),
    "lamb": (
        (*_OTHERS, "bf16-collage-plus", "coat", "fp8-fishman", "fp8lm-o3"), partial(Lamb, lr=1e-2, weight_decay=0.1),
    ),
    "nadam": (("fp32", "adamw-8bit"), partial(torch.optim.NAdam, lr=1e-2, weight_decay=0.1)),
    "rmsprop": (("fp32", "adamw-8bit"), partial(torch.optim.RMSprop, lr=1e-2, centered=True)),
    "adagrad": (("fp32",), partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1, maximize=True)),
}  # fmt: skip
"""By kernel: the recipes to test, and a function from parameter groups to an optimizer."""
GPU = (
    *(
        test
        for kernel, (recipes, make) in _OPTIMIZERS.items()
        for test in kernel_tests(kernel, named(get_recipe, *recipes), stepped, product(list(_GRADIENTS)[:3]), make=make)
    ),
    *kernel_tests(
        "adamw of parts", named(get_recipe, "bf16-stochastic"), _parts,
        (  # shards of a tensor of shape (40, 30, 20): rows, columns, and (start, run, stride) of `shards.run_of`
            (slice(0, 13), slice(0, 30), (0, 7800, 24000)), (slice(13, 40), slice(0, 30), (7800, 16200, 24000)),
            (slice(0, 40), slice(7, 30), (140, 460, 600)), (slice(20, 40), slice(0, 7), (12000, 140, 600)),
        ),
    ),
)  # fmt: skip
