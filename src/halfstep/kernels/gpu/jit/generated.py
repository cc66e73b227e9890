"""Functions that are made of update rules' programs: Triton source (`gpu.source`), and nothing else, is executed."""

import linecache
from functools import cache
from hashlib import sha256
from typing import Any

import triton
import triton.language as tl

from halfstep.kernels.arithmetic import Program
from halfstep.kernels.gpu import source


@cache
def moving(program: Program) -> Any:
    """What moves one element."""
    return _made("moved", source.moving(program))


@cache
def norming(program: Program) -> Any:
    """What norms are taken of."""
    return _made("normed", source.norming(program))


@cache
def finding(program: Program, by_step: int) -> Any:
    """What finds the numbers of a step."""
    return _made("found", source.finding(program, by_step))


def _made(name: str, text: str) -> Any:
    """The function of that name, under a name of its own: Triton looks kernels up by the text, which it asks Python for
    by the name of a file."""
    own = f"{name}_{sha256(text.encode()).hexdigest()[:16]}"
    text = text.replace(f"def {name}(", f"def {own}(")
    file = f"<{own}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(text, file, "exec"), scope)
    return scope[own]
