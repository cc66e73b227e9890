"""Store a model's parameters and their gradients in another dtype or as codes, in place; and check its buffers.

Buffers that were rounded by a cast to 16 bits are recognized by their values.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from halfstep.bits.origin import narrowed, progression
from halfstep.bits.scan import scan
from halfstep.bits.values import InMemory
from halfstep.errors import ModelError, RecipeError, unknown
from halfstep.nn.adapters import wide
from halfstep.nn.adopt import extend
from halfstep.nn.paths import adapters_of, matches, same_parameters
from halfstep.ops.code_tensor import CodeTensor, parameter, round_gradient, round_gradients
from halfstep.ops.snapshot import snapshot
from halfstep.ops.subclasses import foreign
from halfstep.recipe import DTYPES, Codes, Recipe


# ---- parameters as codes ---------------------------------------------------------------------------------------------


def store_as_codes(model: nn.Module, names: Sequence[str], codes: Codes) -> None:
    """Store the named parameters and their gradients as `codes` says. They stay the same objects. Names that are no
    parameters any more (parametrized since) are left out.

    Raises:
        ModelError: a weight is sharded. Nothing was changed.
    """
    weights: dict[int, nn.Parameter] = {}
    for weight, name in same_parameters(model, names):
        if hasattr(weight, "device_mesh"):
            raise ModelError(
                f"{type(model).__name__}: {name} is sharded, and this recipe keeps it as codes with "
                "scales, of which no rank has the whole. Under fully_shard take a recipe whose weights are values "
                "('fp8-delayed', 'fp8-current')"
            )
        if not isinstance(weight, CodeTensor):  # another optimizer of this model has made it one
            weights[id(weight)] = weight
    for weight in weights.values():
        coded: Any = parameter(CodeTensor.encode(weight, codes.weights.quantizer), weight.requires_grad)
        _swap_contents(weight, coded, vars(weight))
        if codes.grads is not None:
            round_gradients(weight, codes.grads.quantizer)  # type: ignore[arg-type]
    for module in model.modules():
        if any(id(p) in weights for p in module._parameters.values()):
            extend(module, _members)
    if weights:
        extend(model, _checked_apply)


def decode_parameters(model: nn.Module) -> None:
    """Make parameters that are CodeTensors plain parameters with their values, and their gradients plain tensors."""
    for weight in list(model.parameters()):
        if isinstance(weight, CodeTensor):
            own = vars(parameter(CodeTensor.encode(weight.values(), weight.quantizer)))
            kept = {name: value for name, value in vars(weight).items() if name not in own}
            _swap_contents(weight, nn.Parameter(weight.values(), weight.requires_grad), kept)


def _swap_contents(weight: Any, other: Any, attributes: dict[str, Any]) -> None:
    """Give the parameter `weight` the class and contents of `other`, which has no other references, and `attributes`.
    The object, its gradient, hooks and references to it stay.

    Like torch.utils.swap_tensors, which refuses tensors with weak references: here these keep referring to the
    parameter. A graph that saved the old contents raises in its backward pass.
    """
    grad, weight.grad = weight.grad, None
    hooks, after = weight._backward_hooks, weight._post_accumulate_grad_hooks
    if weight._use_count() > 1 and weight.requires_grad and weight.is_leaf:
        torch.autograd.graph.get_gradient_edge(weight).node.register_prehook(_refuse)
    attributes = {**vars(other), **attributes}
    weight.__class__, other.__class__ = type(other), type(weight)
    weight.__dict__, other.__dict__ = attributes, {}
    torch._C._swap_tensor_impl(weight, other)
    weight._backward_hooks = hooks
    for key in [key for key, hook in (after or {}).items() if hook is round_gradient]:
        del after[key]
    weight._post_accumulate_grad_hooks = after
    if grad is not None:
        weight.grad = grad.values() if isinstance(grad, CodeTensor) else grad


def _refuse(grads: Any) -> NoReturn:
    raise ModelError(
        "a backward pass belongs to a forward pass from before a weight became codes (halfstep.prepare) or values "
        "again (halfstep.revert), so its gradient would not reach the weight: run the forward again"
    )


# ---- state dicts and conversions -------------------------------------------------------------------------------------


def _members(stock: type[nn.Module]) -> dict[str, Any]:
    """Members of modules with CodeTensor parameters: state dicts of values, and `_apply` (`.to()`, ...) for codes."""

    def _save_to_state_dict(module: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        stock._save_to_state_dict(module, destination, prefix, keep_vars)
        for name, weight in module._parameters.items():
            if isinstance(weight, CodeTensor) and not keep_vars:
                destination[prefix + name] = snapshot(weight)

    def _apply(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = {name: p for name, p in module._parameters.items() if isinstance(p, CodeTensor)}
        module._parameters.update(dict.fromkeys(held))
        try:
            stock._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            module._parameters.update(held)
        for name, weight in held.items():
            _convert(weight, name, fn)
        return module  # type: ignore[no-any-return]

    return {"_save_to_state_dict": _save_to_state_dict, "_apply": _apply}


def _checked_apply(stock: type[nn.Module]) -> dict[str, Any]:
    """Members of the root: `_apply` that checks, before anything is converted, that all CodeTensors can be."""

    @torch.no_grad()
    def _apply(model: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, weight in model.named_parameters():
            if isinstance(weight, CodeTensor):
                _check(weight, name, fn(torch.empty(0, dtype=weight.dtype, device=weight.device)))
        stock._apply(model, fn, recurse)  # type: ignore[no-untyped-call]
        return model  # type: ignore[no-any-return]

    return {"_apply": _apply}


def _check(weight: CodeTensor, name: str, converted: Tensor) -> None:
    if converted.dtype != weight.dtype:
        raise ModelError(
            f"{name} is stored as {weight.quantizer.format.name} codes, and would become {converted.dtype}: cast the "
            "model before halfstep.prepare, or halfstep.revert it first"
        )


@torch.no_grad()
def _convert(weight: Any, name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply `fn` of `module._apply` (`.to()`, `.cuda()`, ...) to a CodeTensor parameter, in place.

    Raises:
        ModelError: `fn` changes the dtype.
    """
    new = fn(weight)
    _check(weight, name, new)
    if new is weight:
        return
    if new.device == weight.device:
        weight.write(new)
        return
    grad = None if weight.grad is None else fn(weight.grad)
    quantizer, weight.grad = weight.grads, None
    codes = parameter(CodeTensor.encode(new, weight.quantizer), weight.requires_grad)
    _swap_contents(weight, codes, {k: v for k, v in vars(weight).items() if k not in vars(codes)})
    weight.grad = grad
    if quantizer is not None:
        round_gradients(weight, quantizer)


# ---- parameters in another dtype -------------------------------------------------------------------------------------


def storable(
    model: nn.Module, float32_modules: Sequence[str] = (), adapters: Mapping[str, nn.Parameter] | None = None
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """The parameters that a recipe may store in its dtype, by name, and the reasons why others keep theirs, by name.

    Args:
        float32_modules: globs of modules whose parameters stay float32.
        adapters: the parameters of adapters, which are stored in float32.
    """
    wide_ones = {id(p) for module in wide.find(model, float32_modules).values() for p in module.parameters()}
    moves: dict[str, nn.Parameter] = {}
    kept: dict[str, str] = {}
    for path, module in model.named_modules():
        running = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        for full, weight in module.named_parameters(path, recurse=False):
            if running:
                kept[full] = "its running statistics average over thousands of steps"
            elif full in (adapters or ()):
                kept[full] = "it is an adapter's, in float32"
            elif id(weight) in wide_ones:
                kept[full] = "its module computes in float32"
            elif type(weight) is not nn.Parameter and (kind := foreign(weight)) is not None:
                kept[full] = f"it is a {kind}"
            elif weight.dtype in DTYPES.values():
                moves[full] = weight
            else:
                kept[full] = f"it is {weight.dtype}"
    return moves, kept


def wide_adapters(model: nn.Module, recipe: Recipe) -> dict[str, nn.Parameter]:
    """The parameters of adapters that a recipe with 16-bit weights stores in float32; empty for other recipes."""
    if recipe.weights == "fp32" or not recipe.float32_adapters:
        return {}
    is_adapter = adapters_of(model)
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if is_adapter(name) and p.dtype in DTYPES.values() and foreign(p) is None}


def unstorable(weight: nn.Parameter) -> str | None:
    """Why no recipe can be applied to a model with this weight, as a text that follows its name; else None."""
    if weight.dtype == torch.float64:
        return "is float64, which no recipe stores; call model.float() first"
    if weight.is_complex():
        return (
            f"is {weight.dtype}, and recipes store and step on real numbers; keep its real and imaginary parts as "
            "two parameters (torch.view_as_complex joins them)"
        )
    if hasattr(weight, "device_mesh"):
        return "is sharded; apply the recipe before fully_shard"
    if weight.requires_grad and type(weight) is not nn.Parameter and (kind := foreign(weight)) is not None:
        return (
            f"is trained and is a {kind}, whose numbers its own library keeps: apply the recipe before that library "
            "converts the model, or freeze these weights (requires_grad_(False)) and train others beside them, such as "
            "LoRA's"
        )
    return None


def store(weight: Tensor, dtype: torch.dtype, grads: torch.dtype | None = None) -> None:
    """Cast a parameter to `dtype`, in place, and its gradient to `grads` (None: `dtype`), in which gradients accumulate
    from then on. It stays the same object, so ties hold."""
    grads = grads or dtype
    if weight.dtype == dtype and (weight.grad_dtype or dtype) == grads:
        return
    grad, weight.grad = weight.grad, None
    weight.data = weight.data.to(dtype)
    if (weight.grad_dtype or dtype) != grads:
        weight.grad_dtype = grads
    if grad is not None:
        weight.grad = grad.to(grads)


def count(model: nn.Module, others: Mapping[int, torch.dtype] | None = None) -> dict[str, int]:
    """The number of parameters that the model stores in each dtype, most first; tied ones count once.

    Args:
        others: by id of a parameter, a dtype to count it under instead of its own.
    """
    counts: Counter[str] = Counter()
    for weight in model.parameters():
        counts[str((others or {}).get(id(weight), weight.dtype)).removeprefix("torch.")] += weight.numel()
    return dict(counts.most_common())


# ---- buffers ---------------------------------------------------------------------------------------------------------

RECOMPUTE = (
    "compute them again in float32 (transformers' rotary embeddings: m.inv_freq = type(m)(m.config).inv_freq, and so "
    "m.original_inv_freq)"
)
"""The advice for buffers that a cast rounded."""

_SHIFT = 2.0**-5
"""By how many standard deviations rounding a norm's running mean may shift its output. Rounding its input to bf16 does
as much if the mean is eight times the standard deviation."""


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers, by name, that a cast to 16 bits may harm: neither scales beside integer codes, nor a
    norm's running statistics if rounding them changes its output less than rounding its input does."""
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
    """Whether its values can be read: it is a plain strided tensor, neither fake nor meta."""
    return type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta


def _rounded_to(buffer: Tensor) -> str | None:
    """The 16-bit format that a buffer's values were rounded to, whatever dtype it has now; None if they were not."""
    if not _readable(buffer):
        return None
    return narrowed(scan(InMemory(buffer)), str(buffer.dtype).removeprefix("torch.")) or progression(buffer)


def rounded(model: nn.Module) -> dict[str, Tensor]:
    """The 16-bit buffers whose values were rounded to 16 bits by a cast."""
    found = {name: b for name, b in buffers(model).items() if b.dtype in (torch.bfloat16, torch.float16)}
    return {name: buffer for name, buffer in found.items() if _rounded_to(buffer)}


def check_float32(model: nn.Module, globs: Sequence[str], recipe: str) -> None:
    """Check that the buffers that `globs` match are float32 and were not rounded to 16 bits.

    Raises:
        RecipeError: a glob matches no floating-point buffer.
        ModelError: a buffer is not float32, or was rounded.
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
