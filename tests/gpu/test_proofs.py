"""Triton kernels without a GPU: equal to the reference in the interpreter, and compiled for GPUs that are not here.

`make gpu-proofs` downloads the needed versions of triton, each into its own folder, and runs all tests. The fast tests
run one format of every kernel in the interpreter."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from families import for_each
from halfstep.kernels import gpu


ROOT = Path(__file__).parents[2]
FOLDER, KERNELS = ROOT / ".triton", Path(gpu.__file__).parent
PINNED, OLDEST, NEWEST = "3.7.1", "3.6.0", "3.9.0"
"""The triton versions of torch 2.13, torch 2.11 and torch 2.15."""
KEPT = KERNELS / "proofs.json"
INSTRUCTIONS, REGISTERS = 1.1, 255


def process(script, version, *arguments, sources=ROOT / "src", **variables):
    """A finished run of a script under that version of triton."""
    if not (FOLDER / version / "triton").exists():
        pytest.skip(f"no triton {version} in {FOLDER}: `make gpu-proofs` fetches it (Linux, x86)")
    variables["PYTHONPATH"] = os.pathsep.join(str(part) for part in (sources, ROOT / "tests", FOLDER / version))
    return subprocess.run(
        [sys.executable, Path(__file__).parent / script, *arguments],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def json_lines(script, version, *arguments, **options):
    """The lines of JSON that a script prints under that version of triton."""
    run = process(script, version, *arguments, **options)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def assert_all_equal(outcomes, version):
    assert outcomes
    assert {outcome["triton"] for outcome in outcomes} == {version}
    assert not [outcome for outcome in outcomes if outcome["difference"]]
    assert all(outcome["compared"] for outcome in outcomes)


def assert_sound(kernels):
    """No contraction, no approximation, no spills, 16-byte memory accesses, and a barrier between each write to shared
    memory and another thread's read."""
    assert kernels
    bad = ("contracted", "approximate", "spilled", "narrow", "unordered")
    assert not [kernel for kernel in kernels if any(kernel.get(key) for key in bad)]


def change(right, wrong, folder):
    """Copy the sources to a folder, with `right` replaced by `wrong` in the kernels."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    kernels = folder / "src" / "halfstep" / "kernels" / "gpu" / "jit"
    texts = {file: file.read_text() for file in kernels.glob("*.py")}
    assert any(right in text for text in texts.values())
    for file, text in texts.items():
        file.write_text(text.replace(right, wrong))


def test_every_kernel_equals_the_reference_in_the_interpreter():
    assert_all_equal(json_lines("interpreted.py", PINNED, "--core", TRITON_INTERPRET="1"), PINNED)


@pytest.mark.slow
def test_no_program_accesses_out_of_bounds_or_races():
    found = json_lines("watched.py", PINNED, TRITON_INTERPRET="1")
    assert len(found) > 20
    assert not [one for one in found if one["faults"] or not one["compared"]]


FAULTS = [
    ('tl.atomic_max(found, top, sem="relaxed")', "tl.store(found, top)", "two programs store to one address"),
    ("tl.load(x + start + part + index, mask=inside, other=0)", "tl.load(x + start + part + index)", "outside of"),
]
OFFSETS = [("(row.to(tl.int64) * columns)", "rows"), ("tl.program_id(0).to(tl.int64) * B", "casts")]


def test_the_texts_that_tests_replace_are_in_the_kernels():
    texts = "".join(file.read_text() for file in (KERNELS / "jit").glob("*.py"))
    assert not [right for right, *_ in (*FAULTS, *OFFSETS) if right not in texts]


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong", "fault"), FAULTS)
def test_a_missing_atomic_or_mask_is_detected(right, wrong, fault, tmp_path):
    change(right, wrong, tmp_path)
    found = json_lines("watched.py", PINNED, "amax", TRITON_INTERPRET="1", sources=tmp_path / "src")
    assert any(fault in said for one in found for said in one["faults"])


@pytest.mark.slow
def test_kernels_are_correct_beyond_2_to_the_31_elements():
    found = json_lines("far.py", PINNED, TRITON_INTERPRET="1")
    assert len(found) == 24
    assert not [one["kernel"] for one in found if not one["equal"]]


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "test"), OFFSETS)
def test_a_32_bit_offset_is_detected(offset, test, tmp_path):
    """The interpreter then reads another element, or out of bounds, which ends its process."""
    change(offset, offset.replace(".to(tl.int64)", ""), tmp_path)
    run = process("far.py", PINNED, test, sources=tmp_path / "src", TRITON_INTERPRET="1")
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert run.returncode < 0 or any(not line["equal"] for line in lines), run.stderr[-3000:]


@pytest.mark.parametrize(
    "recipes",
    [
        ("fp8-delayed",),
        pytest.param(("fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"), marks=pytest.mark.slow),
    ],
    ids="|".join,
)
def test_native_layers_equal_layers_rounded_by_the_cpus_kernels(recipes):
    """Bit for bit: outputs, gradients and scaling states, also with a weight that two micro-batches share or an input
    that two layers read, which are rounded once unless they have scaling states. And the native path is taken."""
    found = json_lines("native_layers.py", PINNED, *recipes, TRITON_INTERPRET="1")
    assert tuple(one["recipe"] for one in found) == recipes
    assert [(one["wrong"], one["native"]) for one in found] == [([], 10)] * len(recipes)
    assert [one["weights"] for one in found] == [[4, 2]] * len(recipes)
    assert [one["inputs"] for one in found] == [2 if name == "fp8-delayed" else 1 for name in recipes]


@pytest.mark.slow  # the interpreter covers the same lines
def test_every_kernel_compiles_for_a_hopper_gpu():
    assert_sound(json_lines("compiled.py", PINNED, "--core"))


@pytest.mark.slow
@pytest.mark.parametrize(("version", "arguments"), [(PINNED, ()), (OLDEST, ()), (NEWEST, ("--core",))])
def test_every_format_equals_the_reference_in_the_interpreter(version, arguments):
    """With numpy 2.4 the oldest interpreter cannot loop up to an argument, as `seeds` does; the newest supports no mask
    for atomics, as `tiles` of several rows have. Both compile."""
    found = json_lines("interpreted.py", version, *arguments, TRITON_INTERPRET="1")
    assert_all_equal([one for one in found if (version, one["kernel"]) != (OLDEST, "seeds")], version)


def summary(kernels):
    """By kernel and format: the number of launches, and the largest numbers of instructions per element and
    registers."""
    found = {}
    for kernel in kernels:
        formats = found.setdefault(kernel["kernel"], {})
        row = formats.setdefault(kernel["format"], {"launches": 0, "instructions": 0, "registers": 0})
        row["launches"] += 1
        for key in ("instructions", "registers"):
            row[key] = max(row[key], kernel[key])
    return found


@pytest.mark.slow
def test_every_launch_compiles_without_more_instructions_than_recorded():
    """HALFSTEP_KEEP=1 records the counts, which `halfstep doctor` prints for kernels that it cannot run."""
    kernels = json_lines("compiled.py", PINNED)
    assert_sound(kernels)
    found = summary(kernels)
    if os.environ.get("HALFSTEP_KEEP"):
        data = {"triton": PINNED, "capability": "9.0", "kernels": found}
        KEPT.write_text(json.dumps(data, indent=2) + "\n")
    kept = json.loads(KEPT.read_text())["kernels"]
    assert {kernel: set(formats) for kernel, formats in found.items()} == {k: set(f) for k, f in kept.items()}
    for kernel, formats in found.items():
        for format, row in formats.items():
            before = kept[kernel][format]["instructions"]
            assert row["instructions"] <= before * INSTRUCTIONS, f"{kernel}, {format}: {row} for {before}"


@pytest.mark.slow
def test_encoding_by_instruction_takes_at_most_6_instructions_per_element():
    kernels = json_lines("compiled.py", PINNED, "codes")
    assert_sound(kernels)
    kernels = [kernel for kernel in kernels if kernel["launch"]["INSTRUCTION"] != "=None"]
    assert {kernel["format"] for kernel in kernels} == {"float8_e4m3fn", "float8_e5m2"}
    assert all(kernel["converted"] for kernel in kernels)
    assert all(kernel["instructions"] <= 6 for kernel in kernels if kernel["launch"]["SOURCE"] != "=float16")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "100"])
def test_every_kernel_compiles_for_other_gpus(capability):
    assert_sound(json_lines("compiled.py", PINNED, "--core", "--capability", capability))


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_kernel_compiles_with_other_tritons(version):
    assert_sound(json_lines("compiled.py", version, "--core"))


CONVERSIONS = {"float8e4nv", "float8e5", "bfloat16", "float16", "sqrt", "exp", "exp2", "log", "log2", "rsqrt", "fma"}
"""Attributes of triton.language that differ between a GPU and the interpreter."""
ON_A_GPU = {("tiles", "fma"), ("optimizer", "sqrt")}
"""Uses that the interpreter never reaches, corrections of quotients (`quantizers.Rule.corrections`); and float64's
root, which is rounded once in both."""


@for_each("file", sorted((KERNELS / "jit").glob("*.py")), ids=lambda file: file.stem)
def test_kernels_use_only_operations_that_are_exact_everywhere(file):
    nodes = list(ast.walk(ast.parse(file.read_text())))
    assert not [node.lineno for node in nodes if isinstance(node, ast.Div)]
    used = {(node.lineno, node.attr) for node in nodes if isinstance(node, ast.Attribute) and node.attr in CONVERSIONS}
    assert not {(line, name) for line, name in used if (file.stem, name) not in ON_A_GPU}


@pytest.mark.slow
def test_the_host_benchmark_runs_without_a_gpu():
    """And native layers launch two kernels per matrix, or one."""
    run = process("../../benchmarks/host.py", PINNED, "--rounds", "1")
    assert run.returncode == 0, run.stderr[-3000:]
    launches = {line.split()[0]: float(line.split()[2]) for line in run.stdout.splitlines()}
    assert {name: launches[name] for name in ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block")} == {
        "fp8-current": 6, "fp8-delayed": 6, "fp8-rowwise": 6, "fp8-block": 3,
    }  # fmt: skip
    assert launches["update"] == launches["bf16-stochastic"] == 2
