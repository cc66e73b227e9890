"""`halfstep doctor`: which paths this machine takes, and finding kernels that differ from the reference."""

import ast
import json
import re
from functools import partial

import pytest
import torch

from halfstep.cli import diagnosis as doctor
from halfstep.kernels import gpu, selftest
from halfstep.kernels.cpu import cast, optimizer, rows
from halfstep.kernels.gpu import source
from halfstep.kernels.selftest.case import compare, outcome
from halfstep.optim import selftest as optim
from halfstep.optim.rules import update_rules
from halfstep.recipe import get_recipe


def faulty(kernel, run):
    """The selftest of a kernel on e5m2, with `run` in place of the kernel."""
    (test,) = [test for test in selftest.CPU if (test.kernel, test.format) == (kernel, "float8_e5m2")]
    return test._replace(make=partial(test.make, run=run))


@pytest.mark.slow  # compiles every kernel; each kernel has fast tests of its own
def test_every_kernel_equals_the_reference(run):
    code, out, err = run("doctor", "fp8-current", "mxfp8", "fp32", "--json")
    assert code == 0
    assert err.startswith("testing every kernel: minutes where they are not compiled yet")
    data = json.loads(out)
    assert data["passed"]
    assert {test["kernel"] for test in data["kernels"]} == {
        *("cast", "scaled", "amax", "posit", "codes", "packed", "decode", "cast errors", "accumulate", "carried"),
        *("tiles", "panels", "blocks", "block values", "values of views", "blocks dequantised", "powered rows"),
        *("powered columns", "rotated", "rotated tiles", "quantiles", "rows", "folded", "slopes"),
        *("sparse products", "few rows", "whole products", "adam"),
    }
    assert all(test["compared"] > 0 and test["difference"] is None for test in data["kernels"])
    paths = {row["recipe"]: row for row in data["recipes"]}
    assert list(paths) == ["fp8-current", "mxfp8", "fp32"]
    assert paths["fp32"]["products"] == "float32, torch's own"
    assert paths["fp32"]["quantised"] == "not rounded"
    assert paths["mxfp8"]["quantised"] == "float8_e4m3fn 1x32 by kernel"


@pytest.mark.parametrize("here", [True, False])
def test_reported_paths_follow_the_machine(run, monkeypatch, carry, here):
    carry(*[torch.bfloat16, torch.float16] if here else [])
    monkeypatch.setattr(selftest, "CPU", ())
    monkeypatch.setattr(optim, "CPU", ())
    code, out, _ = run("doctor", "bf16-mixed")
    assert code == 0
    assert ("bf16 carried in float32" in out) == here
    assert ("bf16, torch's own" in out) != here
    assert torch.cuda.is_available() or "compiles for sm_90" in out
    assert re.search(r"^compiled code +\d+ MiB in ", out, re.MULTILINE)


def test_kernel_that_differs_in_one_element_is_found(run, monkeypatch):

    def wrong(x, out, *options):
        done = cast.run(x, out, *options)
        if out.numel() > 100:
            out.view(-1)[7] = 1.5
        return done

    monkeypatch.setattr(selftest, "CPU", [faulty("cast", wrong)])
    monkeypatch.setattr(optim, "CPU", ())
    code, _, err = run("doctor", "fp8-current")
    assert code == 1
    assert "kernel cast, float8_e5m2: float32, 16387, nearest_even, saturate: element 7 of" in err
    assert ": 1.5 found, " in err
    assert "Do not train with it here" in err
    assert err.count("error:") == 1


def test_kernel_that_raises_or_takes_no_input_is_found():
    def broken(*arguments):
        raise RuntimeError("illegal instruction")

    assert outcome(faulty("decode", broken)).difference == "raised RuntimeError: illegal instruction"
    assert outcome(faulty("cast", lambda *arguments: False)).difference == "the kernel took no input"


def test_matrix_kernels_equal_the_reference(monkeypatch):
    """The kernels pass, and one that differs in one element is found."""
    tests = [test for test in selftest.CPU if test.kernel in ("rows", "sparse products")]
    found = list(map(outcome, tests))
    assert {test.kernel for test in found} == {"rows", "sparse products"}
    assert all(test.passed and test.compared for test in found), [test for test in found if not test.passed]
    right = rows.run

    def wrong(x, out, *options):
        done = right(x, out, *options)
        out.view(-1)[-1] += 1
        return done

    monkeypatch.setattr(rows, "run", wrong)
    assert {test.kernel for test in map(outcome, tests) if not test.passed} == {"rows"}


def test_optimizer_step_that_differs_is_found(monkeypatch):
    right = optimizer.prepare

    def wrong(names, weight, *arguments):
        update = right(names, weight, *arguments)

        def off(*step):
            done = update(*step)
            weight.view(-1)[-1:].mul_(1.01)
            return done

        return off

    monkeypatch.setattr(optimizer, "prepare", wrong)
    found = [outcome(test) for test in optim.CPU if test.format in ("fp32", "bf16-master")]
    assert len(found) == 2
    assert not any(test.passed for test in found)
    assert all(test.difference.startswith("ordinary, ") for test in found)


def test_compare_finds_signs_of_zero_but_ignores_signs_of_nan():
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert compare(nan, -nan, "x", nan) is None
    assert compare(zero, -zero, "x", zero) == "x: element 0 of 0.0: -0.0 found, 0.0 expected; 1 of 1 differ"
    assert compare(zero, nan, "x", zero) is not None
    codes = torch.tensor([3, 4], dtype=torch.uint8)
    assert compare(codes, codes.flip(0), "x") == "x: element 0: 4 found, 3 expected; 2 of 2 differ"


def test_too_old_triton_is_not_used(monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "hip", None)
    answers = {}
    for found in ("3.4.0", "3.6.0"):
        monkeypatch.setattr(gpu, "version", lambda name, found=found: found)
        gpu.missing.cache_clear()
        answers[found] = gpu.missing(), doctor._quantised(get_recipe("mxfp8"), doctor.gpu_path, gpu.missing())
    gpu.missing.cache_clear()
    assert answers["3.4.0"][0] == "triton 3.4.0: the kernels need 3.6 or newer"
    assert answers["3.4.0"][1] == "reference: triton 3.4.0: the kernels need 3.6 or newer"
    assert answers["3.6.0"][0] is None
    assert "by kernel" in answers["3.6.0"][1]


def test_source_of_an_update_rule_is_the_gpu_kernels(run):
    code, out, _ = run("doctor", "--source", "sgd")
    assert code == 0
    assert out.startswith("# torch.optim.SGD\n")
    names = [node.name for node in ast.parse(out).body]
    assert names == ["found", "moved"]
    program = update_rules()["sgd"].options(torch.optim.SGD([torch.zeros(1)]).defaults).program
    assert source.moving(program) in out


def test_source_of_a_rule_with_norms_has_the_norm_kernel(run):
    _, out, _ = run("doctor", "--source", "lamb")
    assert out.startswith("# halfstep.optim.Lamb\n")
    assert [node.name for node in ast.parse(out).body] == ["found", "normed", "moved"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        pytest.param(
            "muon",
            "'muon' is no formula of one element",
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brings Muon"),
        ),
        ("adamww", "'adamww' is no update rule"),
    ],
)
def test_rule_without_source_lists_the_rules_that_have_it(run, name, found):
    code, _, err = run("doctor", "--source", name)
    assert code == 2
    assert f"{found}: kernels are made of adagrad, adam, adamw, lamb, lion, " in err
