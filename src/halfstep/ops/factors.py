"""What all of a tensor is multiplied by before it is rounded, and the state that it may follow."""

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import RecipeError
from halfstep.formats import Format
from halfstep.kernels.largest import amax_of
from halfstep.quant import Quantizer, Scaling
from halfstep.quant.scaling import StatefulScaling
from halfstep.quant.tracing import has_memory


def factor_of(
    x: Tensor, format: Format, rule: Scaling, state: Tensor | None, record: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What all of x is multiplied by before it is rounded; and the step's amax, where the pass that rounds has yet to
    raise it. On a GPU and in a traced graph it always has: only when it runs is it known whether the factor needs
    max |x| before that pass."""
    if not (held := has_memory(x)):
        format = formats.as_constant(format.key)
    if not isinstance(rule, StatefulScaling):
        amax = amax_of(x) if rule.reads else x.new_zeros((), dtype=torch.float32)
        return rule.factor(amax, format), None
    if state is None or state.dtype != torch.float32:
        raise _unusable(rule, state)
    if not rule.waits(state):
        return rule.in_use(state, None, format), state[1] if record else None
    amax = amax_of(x, unless=state[0])
    factor = rule.in_use(state, amax, format)  # of this step, whatever comes
    if record and (x.is_cuda or not held):
        return factor, state[1]
    if record:
        rule.record(state, amax)
    return factor, None


def yet_to_form(
    x: Tensor, format: Format, rule: Scaling, state: Tensor | None, record: bool, zero: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """For a pass that forms the factor of all of x itself (`kernels.gpu.layouts.codes`): a factor in use, the step's
    amax to raise, and max |x|, as its bits in `zero` where given (`amax_of`), where there is no factor, or it is 0."""
    if rule.reciprocal:
        return None, None, amax_of(x, found=zero)
    if not isinstance(rule, StatefulScaling) or rule.first is None or not rule.first.reciprocal:
        return *factor_of(x, format, rule, state, record), None
    if state is None or state.dtype != torch.float32 or state.device != x.device:
        raise _unusable(rule, state)
    return state[0], state[1] if record else None, amax_of(x, state[0], zero) if rule.waits(state) else None


def _unusable(rule: StatefulScaling, state: Tensor | None) -> RecipeError:
    if state is None:
        return RecipeError(
            f"{rule.name} scaling needs the state of its operand: halfstep.apply keeps one beside each layer, and "
            "`ops.linear` takes them as `states`"
        )
    if state.dtype != torch.float32:
        return RecipeError(
            f"the state of {rule.name} scaling is {state.dtype}, expected torch.float32: the model was cast after "
            "halfstep.apply (model.half(), model.to(dtype)); cast it first, then apply the recipe"
        )
    return RecipeError(
        f"the state of {rule.name} scaling is on {state.device}, its operand is not: move whole modules (module.to), "
        "whose buffers go with their weights"
    )


def factor_in_use(x: Tensor, quantizer: Quantizer, state: Tensor | None) -> Tensor | None:
    """What the forward multiplied x by, where that depends on earlier steps; None elsewhere."""
    return None if quantizer.stateful is None else factor_of(x, quantizer.format, quantizer.stateful, state, False)[0]


def just_in_time(x: Tensor, quantizer: Quantizer | None, state: Tensor | None) -> Tensor | None:
    """The state given; where a stateful scaling has none, what it becomes after one step of `x` alone."""
    if state is None and quantizer is not None and quantizer.stateful is not None:
        return quantizer.stateful.after(amax_of(x), quantizer.format)
    return state
