"""Store a model's parameters in another dtype, in place; and what casts to 16 bits left in its buffers."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from halfstep.bits.origin import narrowed, progression
from halfstep.bits.scan import scan
from halfstep.bits.values import InMemory
from halfstep.errors import ModelError, RecipeError, unknown
from halfstep.nn.adapters import wide
from halfstep.nn.paths import adapters_of, matches
from halfstep.ops.subclasses import foreign
from halfstep.recipe import DTYPES, Recipe


def storable(
    model: nn.Module, float32_modules: Sequence[str] = (), adapters: Mapping[str, nn.Parameter] | None = None
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """The parameters that a recipe may store in its own dtype, by name, and those it keeps, with the reason: `adapters`
    are in float32."""
    wide_ones = {id(p) for module in wide.find(model, float32_modules).values() for p in module.parameters()}
    moves: dict[str, nn.Parameter] = {}
    kept: dict[str, str] = {}
    for path, module in model.named_modules():
        running = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if running:
                kept[full] = "its running statistics average over thousands of steps"
            elif full in (adapters or ()):
                kept[full] = "it is an adapter's, in float32"
            elif id(parameter) in wide_ones:
                kept[full] = "its module computes in float32"
            elif type(parameter) is not nn.Parameter and (kind := foreign(parameter)) is not None:
                kept[full] = f"it is a {kind}"
            elif parameter.dtype in DTYPES.values():
                moves[full] = parameter
            else:
                kept[full] = f"it is {parameter.dtype}"
    return moves, kept


def wide_adapters(model: nn.Module, recipe: Recipe) -> dict[str, nn.Parameter]:
    """The parameters of adapters, where a recipe stores others in fewer bits, and these in float32."""
    if recipe.weights == "fp32" or not recipe.float32_adapters:
        return {}
    is_adapter = adapters_of(model)
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if is_adapter(name) and p.dtype in DTYPES.values() and foreign(p) is None}


def unstorable(parameter: nn.Parameter) -> str | None:
    """Why no recipe takes a model with this parameter, after its name; None where one does."""
    if parameter.dtype == torch.float64:
        return "is float64, which no recipe stores; call model.float() first"
    if parameter.is_complex():
        return (
            f"is {parameter.dtype}, and recipes store and step on real numbers; keep its real and imaginary parts as "
            "two parameters (torch.view_as_complex joins them)"
        )
    if hasattr(parameter, "device_mesh"):
        return "is sharded; apply the recipe before fully_shard"
    if parameter.requires_grad and type(parameter) is not nn.Parameter and (kind := foreign(parameter)) is not None:
        return (
            f"is trained and is a {kind}, whose numbers its own library keeps: apply the recipe before that library "
            "converts the model, or freeze these weights (requires_grad_(False)) and train others beside them, such as "
            "LoRA's"
        )
    return None


def store(parameter: Tensor, dtype: torch.dtype, grads: torch.dtype | None = None) -> None:
    """Round a parameter into `dtype` and a gradient that it carries into `grads` (None: the same dtype), in which
    gradients accumulate from then on. It stays the same object, ties and all."""
    grads = grads or dtype
    if parameter.dtype == dtype and (getattr(parameter, "grad_dtype", None) or dtype) == grads:
        return
    grad, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if (getattr(parameter, "grad_dtype", None) or dtype) != grads:
        parameter.grad_dtype = grads
    if grad is not None:
        parameter.grad = grad.to(grads)


def check_grad_dtype(grads: str, kind: type = Tensor) -> None:
    """Called before a model is changed.

    Raises:
        ModelError: this torch cannot keep gradients in another dtype than their parameter.
    """
    if not hasattr(kind, "grad_dtype"):
        raise ModelError(
            f"torch {torch.__version__} keeps gradients in the parameters' dtype, and this recipe in {grads}: use "
            "torch 2.10 or newer"
        )


def count(model: nn.Module, others: Mapping[int, torch.dtype] | None = None) -> dict[str, int]:
    """How many parameters the model stores in each dtype, most first; tied ones count once.

    Args:
        others: the dtypes that parameters will have, by their ids, where it is another.
    """
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        counts[str((others or {}).get(id(parameter), parameter.dtype)).removeprefix("torch.")] += parameter.numel()
    return dict(counts.most_common())


RECOMPUTE = (
    "compute them again in float32 (transformers' rotary embeddings: m.inv_freq = type(m)(m.config).inv_freq, and so "
    "m.original_inv_freq)"
)
"""What to do about buffers that a cast rounded."""

_SHIFT = 2.0**-5
"""By how many standard deviations rounding a norm's running mean may move what it returns. Its input in bf16 is off by
as much where the mean is eight times the deviation."""


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers of a model by name that a cast to 16 bits may harm: not the scales beside integer
    codes, and not a norm's running statistics where rounding them moves what it returns by less than its input's bits.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not module._buffers:
            continue
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        beside = (*own.values(), *(p for p in module._parameters.values() if p is not None))
        if any(not t.is_floating_point() and t.dtype != torch.bool and t.numel() > 1 for t in beside):
            continue
        harmless = _STATISTICS if _harmless(module, own) else ()
        floating = {name: b for name, b in own.items() if b.is_floating_point() and name not in harmless}
        found |= {f"{path}.{name}" if path else name: buffer for name, buffer in floating.items()}
    return found


_STATISTICS = ("running_mean", "running_var")


def _harmless(module: nn.Module, own: Mapping[str, Tensor]) -> bool:
    """Whether a norm's running mean and variance may be rounded to bf16."""
    mean, var = (own.get(name) for name in _STATISTICS)
    if mean is None or var is None or not _readable(mean) or not _readable(var):
        return False
    deviation = (var.double() + float(getattr(module, "eps", 0.0))).sqrt()
    return bool((mean.double().abs() * 2.0**-8 <= _SHIFT * deviation).all())


def _readable(buffer: Tensor) -> bool:
    """Whether it has values of its own: a fake tensor has none."""
    return type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta


def _rounded_to(buffer: Tensor) -> str | None:
    """The 16-bit type that a buffer's values were rounded to, whichever dtype it is stored in now."""
    if not _readable(buffer):
        return None
    return narrowed(scan(InMemory(buffer)), str(buffer.dtype).removeprefix("torch.")) or progression(buffer)


def rounded(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are stored in 16 bits and hold values that were rounded to them."""
    found = {name: b for name, b in buffers(model).items() if b.dtype in (torch.bfloat16, torch.float16)}
    return {name: buffer for name, buffer in found.items() if _rounded_to(buffer)}


def check_float32(model: nn.Module, globs: Sequence[str], recipe: str) -> None:
    """Refuse a model whose buffers of those paths are not float32, or hold values that were rounded to 16 bits.

    Raises:
        RecipeError: a glob matches no floating-point buffer.
        ModelError: such a buffer.
    """
    own = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    for glob in globs:
        if not any(matches(name, glob) for name in own):
            raise RecipeError(f"recipe {recipe!r}: float32_buffers: {unknown('buffer', glob, own)}")
    for name, buffer in own.items():
        if not any(matches(name, glob) for glob in globs):
            continue
        if said := _rounded_to(buffer):
            raise ModelError(
                f"{type(model).__name__}: the buffer {name} in {buffer.dtype} holds values rounded to {said}, "
                f"and {recipe!r} names it among its float32_buffers; {RECOMPUTE}, or load the model in float32"
            )
        if buffer.dtype != torch.float32:
            raise ModelError(
                f"{type(model).__name__}: the buffer {name} is {buffer.dtype}, and {recipe!r} names it among its "
                "float32_buffers: expected torch.float32. Cast parameters alone (for p in model.parameters(): p.data = "
                "p.data.bfloat16()), or load the model in float32"
            )
