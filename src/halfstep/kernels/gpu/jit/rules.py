"""What an update rule does to one element, operation by operation that of `optim.rules`, and to its moments."""

import triton
import triton.language as tl

from halfstep.kernels.gpu import table


SCALE: tl.constexpr = tl.constexpr(table.SCALE)
AT_FIRST: tl.constexpr = tl.constexpr(table.AT_FIRST)


@triton.jit
def moved(full, grad, first, second, numbers, RULE: tl.constexpr, L2: tl.constexpr, NESTEROV: tl.constexpr):
    """The weight after a step, and its moments; `second` comes back as it is where a rule has one alone."""
    beta1, rest1 = tl.load(numbers + SCALE + 1), tl.load(numbers + SCALE + 2)
    beta2, rest2 = tl.load(numbers + SCALE + 3), tl.load(numbers + SCALE + 4)
    keep, step_size = tl.load(numbers + SCALE + 6), tl.load(numbers + SCALE + 7)
    grad = grad * tl.load(numbers + SCALE)
    if L2:
        grad = grad + full * tl.load(numbers + SCALE + 5)
    if RULE == "adam":
        first = first * beta1 + grad * rest1
        second = second * beta2 + grad * grad * rest2
        rescale, eps = tl.load(numbers + SCALE + 8), tl.load(numbers + SCALE + 9)
        ratio = tl.div_rn(first, tl.sqrt_rn(second) * rescale + eps)
        return full * keep - ratio * step_size, first, second
    elif RULE == "lion":
        blend = first * beta1 + grad * rest1
        # The sign of an infinity would hide it: NaN shows.
        sign = tl.where(blend > 0.0, 1.0, tl.where(blend < 0.0, -1.0, 0.0)) + (blend - blend)
        return full * keep - sign * step_size, first * beta2 + grad * rest2, second
    elif RULE == "momentum":
        begun = tl.load(numbers + AT_FIRST) == 0.0
        first = tl.where(begun, first * beta1 + grad * rest1, grad)
        if NESTEROV:
            return full - (grad + first * beta1) * step_size, first, second
        else:
            return full - first * step_size, first, second
    else:  # gradient descent without momentum
        return full - grad * step_size, first, second
