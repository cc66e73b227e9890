"""Triton kernels without a GPU: equal to the reference in the interpreter, and compiled for one that is not here.

`make gpu-proofs` fetches the versions of triton that this needs, each into a folder of its own, and runs all of it.
What is not marked slow takes of every kernel one format, in the interpreter.
"""

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
"""The triton that torch 2.13 pins; the ones of torch 2.11 and of torch 2.15."""
KEPT = KERNELS / "proofs.json"
INSTRUCTIONS, REGISTERS = 1.1, 255


def process(script, version, *arguments, sources=ROOT / "src", **variables):
    """A script that has ended, under that version of triton."""
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


def told(script, version, *arguments, **options):
    """What a script says, under that version of triton."""
    run = process(script, version, *arguments, **options)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def equal(outcomes, version):
    assert outcomes
    assert {outcome["triton"] for outcome in outcomes} == {version}
    assert not [outcome for outcome in outcomes if outcome["difference"]]
    assert all(outcome["compared"] for outcome in outcomes)


def sound(kernels):
    """Nothing contracted, nothing approximate, nothing spilled, memory read and written 16 bytes at a time, and a
    barrier between each write to shared memory and what another thread reads there."""
    assert kernels
    bad = ("contracted", "approximate", "spilled", "narrow", "unordered")
    assert not [kernel for kernel in kernels if any(kernel.get(key) for key in bad)]


def change(right, wrong, folder):
    """Copy the sources, with that text of the kernels changed."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    kernels = folder / "src" / "halfstep" / "kernels" / "gpu" / "jit"
    texts = {file: file.read_text() for file in kernels.glob("*.py")}
    assert any(right in text for text in texts.values())
    for file, text in texts.items():
        file.write_text(text.replace(right, wrong))


def test_every_kernel_equals_the_reference_in_the_interpreter():
    equal(told("interpreted.py", PINNED, "--core", TRITON_INTERPRET="1"), PINNED)


@pytest.mark.slow
def test_no_program_leaves_its_tensors_or_meets_another_one():
    found = told("watched.py", PINNED, TRITON_INTERPRET="1")
    assert len(found) > 20
    assert not [one for one in found if one["faults"] or not one["compared"]]


FAULTS = [
    ('tl.atomic_max(found, top, sem="relaxed")', "tl.store(found, top)", "two programs store to one address"),
    ("tl.load(x + start + part + index, mask=inside, other=0)", "tl.load(x + start + part + index)", "outside of"),
]
OFFSETS = [("(row.to(tl.int64) * columns)", "rows"), ("tl.program_id(0).to(tl.int64) * B", "casts")]


def test_what_tests_change_is_in_the_kernels():
    texts = "".join(file.read_text() for file in (KERNELS / "jit").glob("*.py"))
    assert not [right for right, *_ in (*FAULTS, *OFFSETS) if right not in texts]


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong", "fault"), FAULTS)
def test_a_lost_atomic_and_a_lost_mask_are_seen(right, wrong, fault, tmp_path):
    change(right, wrong, tmp_path)
    found = told("watched.py", PINNED, "amax", TRITON_INTERPRET="1", sources=tmp_path / "src")
    assert any(fault in said for one in found for said in one["faults"])


@pytest.mark.slow
def test_kernels_are_right_beyond_2_to_the_31_elements():
    found = told("far.py", PINNED, TRITON_INTERPRET="1")
    assert len(found) == 24
    assert not [one["kernel"] for one in found if not one["equal"]]


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "test"), OFFSETS)
def test_an_offset_of_32_bits_is_seen(offset, test, tmp_path):
    """The interpreter reads where it points to: another number, or outside of every tensor, which ends its process."""
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
def test_native_layers_are_those_that_the_cpus_kernels_round(recipes):
    """Bit for bit: outputs, gradients and scaling states, also with a weight that two micro-batches share, or an
    input that two layers read, rounded once where these have no scales of their own; and they do go that way."""
    found = told("native_layers.py", PINNED, *recipes, TRITON_INTERPRET="1")
    assert tuple(one["recipe"] for one in found) == recipes
    assert [(one["wrong"], one["native"]) for one in found] == [([], 10)] * len(recipes)
    assert [one["weights"] for one in found] == [[4, 2]] * len(recipes)
    assert [one["inputs"] for one in found] == [2 if name == "fp8-delayed" else 1 for name in recipes]


@pytest.mark.slow  # the interpreter goes through the same lines
def test_every_kernel_compiles_for_a_hopper_gpu():
    sound(told("compiled.py", PINNED, "--core"))


@pytest.mark.slow
@pytest.mark.parametrize(("version", "arguments"), [(PINNED, ()), (OLDEST, ()), (NEWEST, ("--core",))])
def test_every_format_equals_the_reference_in_the_interpreter(version, arguments):
    """The oldest interpreter loops to no number that it is given with numpy 2.4, as `seeds` does; the newest takes no
    mask for atomics, as `tiles` of several rows have. Both compile."""
    found = told("interpreted.py", version, *arguments, TRITON_INTERPRET="1")
    equal([one for one in found if (version, one["kernel"]) != (OLDEST, "seeds")], version)


def summary(kernels):
    """By kernel and format: how many launches there are, and the most instructions an element and registers."""
    found = {}
    for kernel in kernels:
        formats = found.setdefault(kernel["kernel"], {})
        row = formats.setdefault(kernel["format"], {"launches": 0, "instructions": 0, "registers": 0})
        row["launches"] += 1
        for key in ("instructions", "registers"):
            row[key] = max(row[key], kernel[key])
    return found


@pytest.mark.slow
def test_every_launch_compiles_and_takes_no_more_instructions_than_before():
    """HALFSTEP_KEEP=1 keeps the counts instead: what `halfstep doctor` says of kernels that it cannot run."""
    kernels = told("compiled.py", PINNED)
    sound(kernels)
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
def test_codes_by_an_instruction_take_at_most_six_an_element():
    kernels = told("compiled.py", PINNED, "codes")
    sound(kernels)
    kernels = [kernel for kernel in kernels if kernel["launch"]["INSTRUCTION"] != "=None"]
    assert {kernel["format"] for kernel in kernels} == {"float8_e4m3fn", "float8_e5m2"}
    assert all(kernel["converted"] for kernel in kernels)
    assert all(kernel["instructions"] <= 6 for kernel in kernels if kernel["launch"]["SOURCE"] != "=float16")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "100"])
def test_every_kernel_compiles_for_other_gpus(capability):
    sound(told("compiled.py", PINNED, "--core", "--capability", capability))


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_kernel_compiles_with_other_tritons(version):
    sound(told("compiled.py", version, "--core"))


CONVERSIONS = {"float8e4nv", "float8e5", "bfloat16", "float16", "sqrt", "exp", "exp2", "log", "log2", "rsqrt", "fma"}
"""Attributes of triton.language that a GPU and the interpreter do not agree on."""
ON_A_GPU = {("tiles", "fma"), ("optimizer", "sqrt")}
"""Those that the interpreter never comes to: a quotient's corrections (`quantizers.Rule.corrections`). And float64's
root, which is rounded once in both."""


@for_each("file", sorted((KERNELS / "jit").glob("*.py")), ids=lambda file: file.stem)
def test_kernels_use_nothing_that_is_not_exact_everywhere(file):
    nodes = list(ast.walk(ast.parse(file.read_text())))
    assert not [node.lineno for node in nodes if isinstance(node, ast.Div)]
    used = {(node.lineno, node.attr) for node in nodes if isinstance(node, ast.Attribute) and node.attr in CONVERSIONS}
    assert not {(line, name) for line, name in used if (file.stem, name) not in ON_A_GPU}


@pytest.mark.slow
def test_the_hosts_benchmark_runs_without_a_gpu():
    """Its own columns name what each row took, and launches are those of a native layer: two a matrix, or one."""
    run = process("../../benchmarks/host.py", PINNED, "--rounds", "1")
    assert run.returncode == 0, run.stderr[-3000:]
    launches = {line.split()[0]: float(line.split()[2]) for line in run.stdout.splitlines()}
    assert {name: launches[name] for name in ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block")} == {
        "fp8-current": 6, "fp8-delayed": 6, "fp8-rowwise": 6, "fp8-block": 3,
    }  # fmt: skip
    assert launches["update"] == launches["bf16-stochastic"] == 2
