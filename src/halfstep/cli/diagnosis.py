"""The checks of `halfstep doctor`: each recipe's path on this machine, and every kernel's self-test."""

from collections.abc import Callable, Sequence

import torch
import typer

from halfstep.cli.terminal import answer, fail, table_text
from halfstep.errors import OptimizerError
from halfstep.kernels import carried
from halfstep.kernels.cpu import blocks, elements, panels, posit, rows, tiles
from halfstep.kernels.cpu.compiled import cached_code
from halfstep.kernels.gpu import blocks as gpu_blocks, missing
from halfstep.kernels.gpu.source import finding, moving, norming
from halfstep.kernels.units_mm import PAYS
from halfstep.ops import is_native_available
from halfstep.optim import update_rules
from halfstep.quant import TENSOR, Quantizer
from halfstep.recipe import DTYPES, Recipe, get_recipe, list_recipes


def diagnosed(recipes: Sequence[str] | None, as_json: bool) -> bool:
    """Print each recipe's path and test every kernel; return whether any kernel differs from the reference."""
    from halfstep.kernels import selftest
    from halfstep.kernels.gpu.proofs import proofs
    from halfstep.kernels.selftest.case import outcome
    from halfstep.kernels.selftest.matrices import tensor_core_tests
    from halfstep.optim import selftest as optim

    with_gpu = torch.cuda.is_available()
    asked = [stage for name in recipes or list_recipes() for stage in get_recipe(name).by_stage]
    machine = _machine()
    paths = [
        {
            "recipe": recipe.name,
            "products": _products(recipe),
            "quantised": _quantised(recipe, _path),
            "fp8 units": _native(recipe),
            **({"quantised on cuda": _quantised(recipe, gpu_path, missing())} if with_gpu else {}),
        }
        for recipe in asked
    ]
    typer.echo("testing every kernel: minutes where they are not compiled yet, seconds afterwards", err=True)
    gpu, absent = torch.device("cuda"), missing() if with_gpu else "no CUDA device"
    tests = [outcome(test) for test in (*selftest.CPU, *optim.CPU)] + [
        outcome(test, gpu) for test in tensor_core_tests(gpu)
    ]
    if absent is None:
        tests += [outcome(t._replace(kernel=f"gpu {t.kernel}"), gpu) for t in (*selftest.GPU, *optim.GPU)]
    proven = {} if absent is None else {proof.kernel: str(proof) for proof in proofs()}
    wrong = [test for test in tests if not test.passed]
    kernels = [
        {"kernel": t.kernel, "format": t.format, "compared": t.compared, "difference": t.difference} for t in tests
    ]
    told = {"machine": machine, "recipes": paths, "claims": _claims(), "kernels": kernels, "proven": proven}
    head = ["recipe", "products", "operands", "FP8 tensor cores", *(["operands on the GPU"] if with_gpu else [])]
    compared = sum(test.compared for test in tests)
    parts = [
        "\n".join(f"{key:<13} {value}" for key, value in machine.items()),
        table_text(head, [tuple(path.values()) for path in paths]),
        "\n".join(_claims()),
        f"{len(tests) - len(wrong)} of {len(tests)} kernel tests equal the reference ({compared:,} results)",
    ]
    if absent is not None:
        parts.append(table_text([f"kernels for CUDA ({absent})", "proven without one"], list(proven.items())))
    answer(as_json, lambda: told | {"passed": not wrong}, lambda: "\n\n".join(parts))
    for test in () if as_json else wrong:
        fail(f"kernel {test.kernel}, {test.format}: {test.difference}. Do not train with it here; please report it")
    return bool(wrong)


def source_of(name: str) -> str:
    """The Triton functions that the GPU's optimizer kernels call for an update rule, with its torch class's default
    options.

    Raises:
        OptimizerError: there is no rule of that name, or it is not a formula of one element.
    """
    made = {key: rule for key, rule in update_rules().items() if rule.options is not None}
    if name not in made:
        found = "is no formula of one element" if name in update_rules() else "is no update rule"
        raise OptimizerError(f"{name!r} {found}: kernels are made of {', '.join(sorted(made))}")
    kind = made[name].torch_class
    own = made[name].options(kind([torch.zeros(1, dtype=torch.float32, device="cpu")]).defaults)  # type: ignore[misc,call-arg]
    made_of = [finding(own.program, len(own.program.names) - 1 - len(own.numbers)), moving(own.program)]
    if own.program.normed.results:
        made_of.insert(1, norming(own.program))
    return "\n\n".join([f"# {kind.__module__.split('.')[0]}.optim.{kind.__name__}", *made_of])


def _machine() -> dict[str, str]:
    tell = getattr(torch.cpu, "get_capabilities", None)
    units = (
        {k: v for k, v in tell().items() if v is True and any(w in k for w in ("bf16", "fp16", "amx"))} if tell else {}
    )
    known = ", ".join(sorted(units)) or ("none" if tell else f"torch {torch.__version__} does not tell")
    found = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "16-bit units": known}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        here = carried.supports(dtype, torch.device("cpu"))
        found[f"{name} on CPU"] = "no units for it: products carried in float32" if here else "torch's own products"
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: nothing below runs on a GPU here"
    return {**found, "cuda": cuda, "compiled code": cached_code()}


def _claims() -> list[str]:
    """General statements: the exactness of operands and matmuls on any machine, and sizes that tensor cores do not
    take."""
    return [
        "operands: equal to the reference, every bit, on every device",
        "carried products: exact terms, summed in float32, rounded once; an error of at most 2 K 2^-24 sum|a b| before",
        "products on FP8 tensor cores (8.9, 9.x): exact terms, sums cut to 13 fraction bits in chunks of 128; fast "
        "sums are never asked for",
        "carried all the same: products whose sides are no multiples of 16 (tiles of 32 and 16: the shared side, of "
        "32; tiles of 128: of 128), are empty, or not in bfloat16",
        f"derived, not measured: tensor cores pay where 1/rows + 1/in + 1/out of a layer is below 1/{1 / PAYS:.0f}; no "
        "path depends on it",
    ]


def _products(recipe: Recipe) -> str:
    """The path of 16-bit matmuls, and of rounded operands, on this CPU."""
    if recipe.compute == "fp32":
        return "float32, torch's own"
    if carried.supports(DTYPES[recipe.compute], torch.device("cpu")):
        return f"{recipe.compute} carried in float32"
    return f"{recipe.compute}, torch's own"


def _quantised(recipe: Recipe, path: Callable[[Quantizer], str], missing: str | None = None) -> str:
    """Whether a kernel or the reference rounds, for each distinct quantizer of the recipe; `missing`: why there are no
    kernels."""
    quantizers = {quantizer for rule in recipe.rules for quantizer in rule.linear.quantizers}
    if quantizers and missing:
        return f"reference: {missing}"
    return "; ".join(sorted({path(quantizer) for quantizer in quantizers})) or "not rounded"


def gpu_path(quantizer: Quantizer) -> str:
    """The Triton kernel or the reference that rounds CUDA tensors by a quantizer; also answers on a machine without a
    GPU."""
    name, scales = quantizer.format.name, quantizer.scales
    if scales is None or scales.tile == TENSOR:
        return f"{name} by {_by_element(quantizer)}"
    sample = torch.zeros(scales.tile.rows or 128, scales.tile.columns or 128, dtype=torch.float32, device="cpu")
    known = gpu_blocks.cut_of(sample, quantizer) is not None
    return f"{name} {scales.tile} by {'kernel' if known else 'reference: no kernel for the tile or its scale rule'}"


def _native(recipe: Recipe) -> str:
    """Whether a GPU's FP8 tensor cores compute the recipe's matmuls, and if not, why."""
    if not any(rule.linear.rounds for rule in recipe.rules):
        return ""
    available, reason = is_native_available(recipe, "cuda", return_reason=True)
    return "yes" if available else f"no: {reason}"


def _path(quantizer: Quantizer) -> str:
    name, scales = quantizer.format.name, quantizer.scales
    if scales is None or scales.tile == TENSOR:
        return f"{name} by {_by_element(quantizer)}"
    across = f"{name} {scales.tile} by "
    if quantizer.by_rows and rows.scalars(quantizer.format, quantizer.rounding) is not None:
        return across + "kernel"
    quantizer = quantizer.plain.inner or quantizer.plain
    if (
        blocks.value_constants(quantizer, scales.tile.columns or 1) is not None
        or panels.constants(quantizer) is not None
    ):
        return across + "kernel"
    if tiles.constants(quantizer) is not None:
        return across + "kernel, in several passes"
    return across + "reference: no kernel for the tile or its scale rule"


def _by_element(quantizer: Quantizer) -> str:
    """The kernel that rounds element by element, on CPUs and GPUs."""
    format, dtypes = quantizer.format, (torch.float32, torch.float32)
    known = elements.scalars(format, quantizer.rounding, quantizer.overflow, *dtypes)
    if known is None and quantizer.scales is None:
        known = posit.scalars(format, quantizer.rounding, *dtypes)
    return "reference: no kernel for the format" if known is None else "kernel"
