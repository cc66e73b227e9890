"""Compiles generated functions: only the Triton source that `gpu.source` makes of update rules is executed."""

import linecache
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from typing import Any

import triton
import triton.language as tl


@cache
def made(source: Callable[..., str], *given: Any) -> Any:
    """The function whose source `source(*given)` returns, under a unique name. Triton caches kernels by source text,
    which it asks Python for by file name, so the text is registered in `linecache`."""
    text = source(*given)
    name = text.partition("def ")[2].partition("(")[0]
    own = f"{name}_{sha256(text.encode()).hexdigest()[:16]}"
    text = text.replace(f"def {name}(", f"def {own}(")
    file = f"<{own}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(text, file, "exec"), scope)
    return scope[own]
