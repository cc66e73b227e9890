"""An addition takes one file: a new member of each family is found, and its conformance tests include it."""

import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]

MADE_UP = {
    "halfstep.formats": '''
from halfstep.formats.floating import Float

made_up = Float("made_up5", 3, 1, 2, "fn", source="made up", aliases=("mu5",))
''',
    "halfstep.quant.scaling": '''
from dataclasses import dataclass

import torch

from halfstep.quant.scaling.base import Scaling


@dataclass(frozen=True)
class Rms(Scaling):
    spread: float = 4.0

    def scale(self, x, tile, element):
        count = tile.reduce(torch.ones_like(x), "sum")
        scale = ((tile.reduce(x * x, "sum") / count).sqrt() * self.spread / element.max).float()
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        return {"scale": scale}, scale

    def multiplier(self, stored, element):
        return stored["scale"]


made_up_rms = Rms("made_up_rms")
''',
    "halfstep.quant.masters": '''
from typing import ClassVar

import torch

from halfstep.quant.masters.base import Master


class Rest(Master):
    """What rounding left over, whole."""

    keeps: ClassVar = {"made_up_rest": torch.float32}

    def start(self, weight, full):
        weight.copy_(full)
        return {"made_up_rest": full - weight.float()}

    def read(self, weight, kept):
        return weight.float() + kept["made_up_rest"]

    def write(self, weight, kept, updated):
        weight.copy_(updated)
        kept["made_up_rest"].copy_(updated - weight.float())

    def follow(self, weight, kept):
        same = self.read(weight, kept).to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
        kept["made_up_rest"].masked_fill_(~same, 0.0)


made_up_rest = Rest("made_up_rest")
''',
    "halfstep.recipe.named": '''
from halfstep import formats
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import block
from halfstep.recipe.products import linear_spec
from halfstep.recipe.operands import Rule
from halfstep.recipe.spec import Recipe
from halfstep.recipe.storage import get_storage

_EIGHT = Quantizer(formats.get("e4m3fn"), scales=Scales(block(32), get_scaling("made_up_rms")))

made_up = Recipe(
    name="made-up",
    summary="One of each.",
    source="made up",
    weights="bf16",
    master="made_up_rest",
    moments=(("exp_avg_sq", get_storage("bf16", residual=True)), ("*", "bf16")),
    compute="bf16",
    rules=(Rule("*", linear_spec(_EIGHT, _EIGHT, _EIGHT), optional=True),),
)
''',
    "halfstep.optim.rules": '''
import torch
from halfstep.kernels.arithmetic import maximum
from halfstep.optim.rules import learning_rate
from halfstep.optim.rules.elementwise import elementwise


def element(weight, grad, moments, o):
    grad = grad + weight * o.decay
    mean = moments["exp_avg"] + (grad - moments["exp_avg"]) * (1 - o.beta1)
    largest = maximum(moments["exp_inf"] * o.beta2, abs(grad) + o.eps)
    return weight - mean / largest * (o.lr / o.correction), {"exp_avg": mean, "exp_inf": largest}


def options(group):
    beta1, beta2 = group["betas"]
    decay = float(group["weight_decay"])
    return {"lr": learning_rate(group), "beta1": beta1, "beta2": beta2, "eps": float(group["eps"]), "decay": decay}


def by_step(step, group):
    return {"correction": 1 - group["betas"][0] ** step}


made_up_adamax = elementwise(
    "made_up_adamax", torch.optim.Adamax, lambda group: ("exp_avg", "exp_inf"), element, options, by_step
)
''',
    "halfstep.lab.tasks": '''
import torch
from torch import nn

from halfstep.lab.experiment import Facts, Metric
from halfstep.lab.task import Task, TaskSpec, stream


class Parity(Task):
    def __init__(self, batch):
        self.size = batch

    def models(self):
        return {"mlp": lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))}

    def batch(self, seed, step):
        bits = torch.randint(0, 2, (self.size, 8), generator=stream(seed, step)).float()
        return {"bits": bits, "odd": bits.sum(1) % 2}

    def held_out(self):
        return [self.batch(-1, 0)]

    def loss(self, model, batch):
        return nn.functional.binary_cross_entropy_with_logits(model(batch["bits"]), batch["odd"])

    def metric(self, model, losses):
        (batch,) = self.held_out()
        return float(((model(batch["bits"]) > 0) == (batch["odd"] > 0)).float().mean())

    def by_heart(self):
        class Counts(nn.Module):
            def forward(self, bits):
                return bits.sum(1) % 2 - 0.5

        return Counts()


made_up_parity = TaskSpec(
    name="made_up_parity",
    summary="the parity of eight bits",
    facts=Facts(
        metric=Metric("accuracy", higher_is_better=True, best=1.0, form="{:.1%}"),
        unit="words",
        defaults={"model": "mlp", "steps": 200, "batch": 64, "lr": 1e-2},
    ),
    open=lambda experiment: Parity(experiment.batch),
)
''',
}  # fmt: skip
START = """
import importlib, pytest, sys
for package, folder in FOLDERS.items():
    importlib.import_module(package).__path__.append(folder)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The start of a program in which each package of MADE_UP has one more file."""
    folders = {}
    for package, text in MADE_UP.items():
        folder = tmp_path_factory.mktemp(package.rpartition(".")[2])
        (folder / "made_up_parity.py").write_text('"""Made up."""\n' + text)
        folders[package] = str(folder)
    return START.replace("FOLDERS", repr(folders))


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow  # tests/test_registry.py is the fast test
def test_new_members_are_found(start):
    code = """
import halfstep, torch
from halfstep.lab.experiment import list_tasks
from halfstep.optim import update_rules
from halfstep.quant.masters import list_masters
from halfstep.quant.scaling import get_scaling

assert "made_up5" in halfstep.formats.names() and "made-up" in halfstep.recipe.list_recipes()
assert "made_up_adamax" in update_rules() and "made_up_rest" in list_masters() and "made_up_parity" in list_tasks()
model = torch.nn.Sequential(torch.nn.Linear(8, 4))
optimizer = torch.optim.Adamax(model.parameters(), lr=0.1)
model, optimizer, scaler = halfstep.prepare(model, optimizer, "made-up")
before = halfstep.recipe.get_recipe("made-up").describe()
for _ in range(3):
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(sorted(optimizer.state[model[0].weight]), float(loss))
"""
    done = run(start + code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['exp_avg', 'exp_inf', 'made_up_rest', 'step']")


FUSED = """
import torch
from dataclasses import replace
from halfstep.optim import convert, update_rules
from halfstep.optim.rules import no_fused_update
from halfstep.recipe import get_recipe

assert "made_up_adamax" in update_rules()
found = []
for fused in (True, False):
    torch.manual_seed(0)
    parameter, stock = (torch.nn.Parameter(torch.linspace(-1, 1, 3000)) for _ in range(2))
    theirs = torch.optim.Adamax([stock], weight_decay=0.1)
    optimizer = convert(torch.optim.Adamax([parameter], weight_decay=0.1), get_recipe("fp32"), {})
    if not fused:
        optimizer.rule = replace(optimizer.rule, fused=no_fused_update)
    for _ in range(3):
        parameter.grad = torch.randn(3000)
        stock.grad = parameter.grad.clone()
        optimizer.step()
        theirs.step()
        assert [way.fused is not None for way in optimizer._together.ways] == [fused]
    torch.testing.assert_close(parameter, stock, rtol=1e-6, atol=1e-6)
    found.append([parameter.detach(), *optimizer.state[parameter].values()])
assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
"""


@pytest.mark.slow
def test_new_update_rule_is_fused(start):
    """Two moments: equals its own formula bit for bit, and torch's Adamax up to the order of roundings."""
    done = run(start + FUSED)
    assert done.returncode == 0, done.stderr


ON_A_GPU = """
import sys

sys.path[:0] = PATHS
import torch
from halfstep.kernels.selftest.case import kernel_tests
from halfstep.optim import selftest
from halfstep.recipe import get_recipe

make = lambda parameters: torch.optim.Adamax(parameters, weight_decay=0.1)
kinds = [("ordinary",), ("wide",), ("hard",)]
selftest.GPU = kernel_tests("made up", {"fp32": get_recipe("fp32")}, selftest.stepped, kinds, make=make)
"""
COMPILED = (
    ON_A_GPU
    + """
import compiled

for _, _, function, arguments, options in compiled.launches({"made up"}, True):
    facts = compiled.facts(function, arguments, options, 90, False)
    assert not any(facts[key] for key in ("contracted", "approximate", "spilled", "narrow")), facts
    print(function.__name__, "compiles")
"""
)
INTERPRETED = (
    ON_A_GPU
    + """
from halfstep.kernels.selftest.case import compare

cases = list(selftest.GPU[0].cases(torch.device("cpu")))
assert cases and not [case for case in cases if compare(*case)]
print(len(cases), "cases equal")
"""
)
TRITON = ROOT / ".triton" / "3.7.1"


@pytest.mark.slow
@pytest.mark.parametrize(("program", "said"), [(COMPILED, "prepare compiles\nupdate compiles"), (INTERPRETED, "equal")])
def test_new_update_rule_has_gpu_kernels(start, program, said, monkeypatch):
    """Its kernels compile for an absent GPU and equal the formula bit for bit in Triton's interpreter."""
    if not (TRITON / "triton").exists():
        pytest.skip(f"no triton in {TRITON}: `make gpu-proofs` fetches it (Linux, x86)")
    if program is INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    paths = repr([str(ROOT / "tests" / "gpu"), str(TRITON)])
    done = run(start + program.replace("PATHS", paths))
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["format", "master", "recipe", "scaling", "task", "update_rule"])
def test_conformance_tests_include_the_new_member(start, kind):
    """Parametrized tests are run for the new member only; for_each loops over all members."""
    file = f"tests/conformance/test_every_{kind}.py"
    arguments = ["-p", "no:cacheprovider", "-q", "-k", "made_up or made-up", file, "-m", "slow or not slow"]
    done = run(f"{start}\nsys.exit(pytest.main({arguments}))")
    assert done.returncode == 0, done.stdout[-4000:]
    loops = run(f'{start}\nsys.exit(pytest.main(["-p", "no:cacheprovider", "-q", "{file}"]))')
    assert loops.returncode == 0, loops.stdout[-4000:]
