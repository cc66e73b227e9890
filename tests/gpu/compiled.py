"""Compile every kernel that the cases launch for a GPU that is not here, and print facts about it as lines of JSON.

    PYTHONPATH=src:.triton/3.7.1 python tests/gpu/compiled.py [--capability 90] [--core] [KERNEL ...]

--core compiles one launch per function, that of a kernel's first case with any, and counts no instructions.

Run it in its own process, without TRITON_INTERPRET: launches are not run but recorded, each kind once, with their
dtypes and constants.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from shared_memory import unordered
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from halfstep.kernels import selftest
from halfstep.kernels.gpu import cast
from halfstep.optim import selftest as optim


TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.int32: "i32", torch.int16: "i16", torch.uint8: "u8", torch.int64: "i64", torch.float32: "fp32",
         torch.int8: "i8", torch.bool: "i1", torch.float64: "fp64"}  # fmt: skip
WARP = 32
SCALARS = {"prepare", "advance", "norm", "seeds"}
"""Functions that compute a few scalars for each tensor."""


def launches(names: set[str], core: bool) -> Iterator[tuple[str, str, JITFunction, dict[str, Any], dict[str, Any]]]:
    """Every kind of launch of the cases: kernel and format it is for, function, arguments by name, options."""
    made: list[tuple[JITFunction, dict[str, Any], dict[str, Any]]] = []

    def note(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key) for key in ("num_warps", "enable_fp_fusion")}
        made.append((self, dict(zip(self.arg_names, arguments, strict=False)) | named, options))

    JITFunction.run = note
    seen: set[tuple[str, str]] = set()
    tested: set[str] = set()
    for test in (*selftest.GPU, *optim.GPU):
        kernel, format = test.kernel, test.format
        if (names and kernel not in names) or (core and kernel in tested):
            continue
        tested.add(kernel)
        for _ in test.cases(torch.device("cpu")):
            launched = bool(made)
            for function, arguments, options in made:
                assert not options["enable_fp_fusion"], f"{function.__name__} is launched with contraction"
                key = function.__name__, "" if core else json.dumps([described(function, arguments), options])
                if key not in seen:
                    seen.add(key)
                    yield kernel, format, function, arguments, options
            made.clear()
            if core and launched:
                break


def described(function: JITFunction, arguments: dict[str, Any]) -> dict[str, str]:
    """By parameter: its type, or its value if it is a constant."""
    kinds = {}
    for parameter in function.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            kinds[parameter.name] = f"={value}"
        elif isinstance(value, torch.Tensor):
            kinds[parameter.name] = "*" + TYPES[value.dtype]
        else:
            kinds[parameter.name] = "fp32" if isinstance(value, float) else "i64" if abs(value) >> 31 else "i32"
    return kinds


def bind(function: JITFunction, arguments: dict[str, Any], options: dict[str, Any], capability: int) -> None:
    """Do what a launch does before it compiles: write a function with the kernel's parameters, which collide with the
    names of `options` if Triton does not rename them, call it, and look up the kernel by the result."""
    backend = make_backend(GPUTarget("cuda", capability, WARP))
    binder = create_function_from_signature(function.signature, function.params, backend)
    _, specialization, others = binder(**arguments, **options, debug=False)
    compute_cache_key({}, specialization, others)


def compiled(function: JITFunction, arguments: dict[str, Any], options: dict[str, Any], capability: int) -> Any:
    """The kernel, compiled for pointers that are multiples of 16, as torch's allocations are."""
    bind(function, arguments, options, capability)
    kinds = described(function, arguments)
    constants = {name: arguments[name] for name, kind in kinds.items() if kind.startswith("=")}
    places = {name: (function.arg_names.index(name),) for name in kinds}
    source = ASTSource(
        function,
        signature={name: "constexpr" if name in constants else kind for name, kind in kinds.items()},
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name, kind in kinds.items() if kind.startswith("*")},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)


def facts(
    function: JITFunction, arguments: dict[str, Any], options: dict[str, Any], capability: int, counts: bool
) -> dict[str, Any]:
    """Facts about a compiled kernel: registers, bytes spilled, and, with `counts`, which needs the disassembler,
    instructions per element of a full block."""
    made = compiled(function, arguments, options, capability)
    ptx = made.asm["ptx"]
    found: dict[str, Any] = {
        # Corrections of quotients use fma on purpose.
        "contracted": 0 if corrections(arguments) else len(re.findall(r"\bfma\.", ptx)),
        "approximate": sorted(set(re.findall(r"[a-z0-9.]*(?:\.approx|\.full|\.ftz)[a-z0-9.]*", ptx))),
        # Functions of scalars, and of rows that start anywhere, have no wide accesses.
        "narrow": [] if function.__name__ in SCALARS or arguments.get("UNIT") == 1 else narrow(ptx),
        "converted": ptx.count("cvt.rn.satfinite."),
        "unordered": unordered(ptx)[:3],
    }
    if capability >= 100:
        return found  # for such a GPU only PTX is checked
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        usage = tool("cuobjdump", "--dump-resource-usage", str(cubin))
        sass = tool("nvdisasm", "-c", str(cubin)) if counts else None
    uses = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    found |= {"registers": int(uses["REG"]), "spilled": int(uses["STACK"]) + int(uses["LOCAL"])}
    if sass is not None:
        repeats = arguments["TALL"] // arguments["ROWS"] if function.__name__ == "both_by_passes" else 1
        elements = repeats * elements_of(arguments) / (WARP * options["num_warps"])
        found["instructions"] = round(full_path(sass, repeats) / elements, 1)
    return found


def corrections(arguments: dict[str, Any]) -> int:
    """The number of corrections of quotients in a kernel, those of tiled moments included."""
    rules = [arguments.get("R"), *[getattr(arguments.get(name), "quotient", None) for name in ("M1", "M2")]]
    return max(getattr(rule, "corrections", 0) for rule in rules)


def narrow(ptx: str) -> list[str]:
    """The global accesses of less than 16 bytes in a kernel without any of 16."""
    accesses = re.findall(r"(?:ld|st)\.global[.a-z0-9_:]*", ptx)
    wide = [a for a in accesses if re.search(r"\.v4\.[bu]32|\.v2\.[bu]64|\.v8\.b32", a)]
    return [] if wide else sorted(set(accesses))


def elements_of(arguments: dict[str, Any]) -> int:
    """The number of elements of a program's block."""
    return arguments["B"] if "B" in arguments else arguments["ROWS"] * arguments["COLUMNS"]


def tool(name: str, *arguments: str) -> str:
    """The output of one of the tools that come with Triton."""
    return subprocess.run([TOOLS / name, *arguments], check=True, capture_output=True, text=True).stdout


def full_path(sass: str, repeats: int = 1) -> int:
    """The instructions of one path through a kernel, with loops run `again` times: at branches, the path with the
    widest accesses."""
    blocks: dict[str, list[str]] = {}
    here = ""
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            here = label[1]
            blocks.setdefault(here, [])
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            blocks.setdefault(here, []).append(instruction[1])
            if re.search(r"\b(BRA|EXIT|RET|BREAK)\b", instruction[1]):
                here += "'"
    names = list(blocks)
    following = {name: _following(blocks, names, place) for place, name in enumerate(names)}
    for place, name in enumerate(names):
        for back in set(following[name]) & set(names[: place + 1]):
            for inner in names[names.index(back) : place + 1]:
                blocks[inner] += blocks[inner] * (repeats - 1)
    return _weighed(names[0], blocks, following, {})[1]


def _following(blocks: dict[str, list[str]], names: list[str], place: int) -> list[str]:
    last = blocks[names[place]][-1] if blocks[names[place]] else ""
    ways = re.findall(r"BRA\S*\s.*?`?\(?(\.L_x_\d+)", last)
    ends = not last.startswith("@") and re.search(r"\b(BRA|EXIT|RET)\b", last)
    return ways + ([] if ends or place + 1 == len(names) else [names[place + 1]])


def _weighed(
    name: str, blocks: dict[str, list[str]], following: dict[str, list[str]], found: dict[str, tuple[int, int]]
) -> tuple[int, int]:
    """Of the best path from a block on: its 16-byte accesses and its instructions. Each block is weighed once, since a
    division branches twice per element; back edges to blocks being weighed count nothing."""
    if name not in found:
        found[name] = 0, 0
        ways = [_weighed(way, blocks, following, found) for way in following[name]]
        best = max(ways, key=lambda way: (way[0], -way[1]), default=(0, 0))
        wide = sum(".128" in instruction for instruction in blocks[name])
        found[name] = wide + best[0], len(blocks[name]) + best[1]
    return found[name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--core", action="store_true")
    parser.add_argument("kernels", nargs="*")
    asked = parser.parse_args()
    cast.capability = lambda device: divmod(asked.capability, 10)  # the GPU to compile for
    made = launches(set(asked.kernels), asked.core)
    for kernel, format, function, arguments, options in made:
        found_facts = {"kernel": kernel, "format": format, "function": function.__name__}
        found_facts |= {"launch": described(function, arguments), "capability": asked.capability}
        print(
            json.dumps(found_facts | facts(function, arguments, options, asked.capability, not asked.core)), flush=True
        )
