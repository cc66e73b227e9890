"""Triton source of an update rule, generated from its program (`kernels.arithmetic`) and executed as it is."""

import numpy as np

from halfstep.kernels.arithmetic import Part, Program


_TEXT = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}",
    "ge": "{} >= {}", "abs": "tl.abs({})", "is_nan": "{0} != {0}", "where": "tl.where({}, {}, {})",
    "single": "{}.to(tl.float32)", "double": "{}.to(tl.float64)",
}  # fmt: skip
# `/` is rounded once for float64 alone; Triton 3.8 and 3.9 do not compile tl.fdiv(..., ieee_rounding=True) of float64.
_ROUNDED_ONCE = {
    ("div", "single"): "tl.div_rn({}, {})", ("div", "double"): "{} / {}",
    ("sqrt", "single"): "tl.sqrt_rn({})", ("sqrt", "double"): "tl.sqrt({})",
}  # fmt: skip


def _lines(part: Part, inputs: list[str]) -> tuple[list[str], list[str]]:
    """The assignments of a part's operations, and the names of its results."""
    names = [*inputs, *map(_constant, part.constants)]
    lines: list[str] = []
    for operation in part.operations:
        text = _TEXT.get(operation.name) or _ROUNDED_ONCE[operation.name, operation.kind]
        lines.append(f"v{len(lines)} = " + text.format(*[names[place] for place in operation.operands]))
        names.append(f"v{len(lines) - 1}")
    return lines, [names[place] for place in part.results]


def _constant(number: float) -> str:
    if number != number or abs(number) == np.inf:
        return f'float("{number}")'
    return repr(number) if float(np.float32(number)) == number else f"tl.full((), {number!r}, tl.float64)"


def moving(program: Program) -> str:
    """The source of `moved(weight, grad, first, second, numbers)`: an element's weight and both moments after a step; a
    moment that the rule does not have is returned unchanged."""
    return _of_an_element("moved", program, program.element, _MOMENTS[len(program.moments) :])


def norming(program: Program) -> str:
    """The source of `normed(...)`, with the same parameters: the values whose norms `moved` reads after the other
    `numbers`."""
    return _of_an_element("normed", program, program.normed, [])


_MOMENTS = ["first", "second"]


def _of_an_element(name: str, program: Program, part: Part, more: list[str]) -> str:
    own = _MOMENTS[: len(program.moments)]
    taken = [f"n{number}" for number in range(part.inputs - len(own) - 2)]
    loads = [f"{number} = tl.load(numbers + {place})" for place, number in enumerate(taken)]
    lines, results = _lines(part, [*taken, "weight", "grad", *own])
    returned = f"return {', '.join([*results, *more])}" + "," * (len(results) + len(more) == 1)
    return _function(name, "weight, grad, first, second, numbers", [*loads, *lines, returned])


def finding(program: Program, by_step: int) -> str:
    """The source of `found(...)`, which writes the scalars of a step for each tensor to `out`.

    Args:
        by_step: how many of the program's names, those after `step`, depend on the step number.
    """
    names = [f"{name}_" for name in program.names]
    loads = [f"{names[0]} = number.to(tl.float64)"]
    loads += [
        f"{name} = tl.load(by_step + settled * {by_step} + {place}, mask=inside, other=1.0)"
        for place, name in enumerate(names[1 : by_step + 1])
    ]
    given = enumerate(names[by_step + 1 :])
    loads += [f"{name} = tl.load(given + {place}, mask=inside, other=1.0)" for place, name in given]
    one = [f"{name}_" for name in program.shared]
    loads += [f"{name} = tl.load(shared, mask=inside, other=1.0)" for name in one]
    lines, results = _lines(program.scalars, [*names, *one])
    count = len(results) - len(one)
    stores = [f"tl.store(out + {place}, {name}, mask=inside)" for place, name in enumerate(results[:count])]
    stores += [f"tl.store(shared, {name}, mask=go)" for name in results[count:]]
    return _function("found", "given, by_step, settled, number, shared, out, inside, go", [*loads, *lines, *stores])


def _function(name: str, parameters: str, lines: list[str]) -> str:
    return "\n".join(["@triton.jit", f"def {name}({parameters}):", *(f"    {line}" for line in lines), ""])
