"""The training runs behind rows of the ledger that are on no other page: recipes compared with a baseline.

    python benchmarks/ledger.py NAME [--keep] [--steps N] [--out FOLDER]

NAME is one of GROUPS. --keep writes results/ledger_NAME.json. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep import formats
from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment
from halfstep.lab.models.gpt import GPT
from halfstep.lab.task import VOCABULARY
from halfstep.lab.tasks import experiment_for
from halfstep.lab.tasks.translation import SOURCE_WORDS, TARGET_WORDS
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import Scaling, get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import Codes, LossScale, Recipe, get_recipe
from halfstep.recipe.operands import KEEP, Rule
from halfstep.recipe.products import linear_spec
from halfstep.recipe.storage import get_storage
from harness import keep
from losses import summary, train
from recurrent import LanguageModel, Translator


@dataclass(frozen=True)
class Comparison:
    """Recipes on one task, and the baseline that they are compared with."""

    experiment: Experiment
    recipes: dict[str, Recipe]
    build: Callable[[], nn.Module] | None = None
    """Builds the model, if it is not one of the task's."""
    baseline: str = "fp32"


_LEAN: dict[str, Any] = {"seeds": 3, "validations": 1, "statistics": 1, "checkpoints": 1}


def named(task: str, *recipes: str, seeds: int = 3, **given: Any) -> Comparison:
    """A comparison of named recipes on a task; the first is the baseline."""
    experiment = experiment_for(task, recipes=recipes, seeds=seeds, validations=1, **given)
    return Comparison(experiment, {name: get_recipe(name) for name in recipes}, baseline=recipes[0])


def betas() -> dict[str, Comparison]:
    """Collage's recipes, whose second moment is bf16, and bf16-kahan, whose is float32, at two values of beta2."""
    recipes = ("fp32", "bf16-kahan", "bf16-collage-plus", "bf16-collage-light")
    return {f"{beta2:g}": named("lm", *recipes, steps=400, betas=(0.9, beta2)) for beta2 in (0.95, 0.999)}


def masters() -> dict[str, Comparison]:
    """A speech model with and without master weights for its 16-bit weights."""
    return {"speech": named("speech", "fp32", "fp16-master", "fp16-nomaster", "fp16-pure", "bf16-nomaster")}


def states() -> dict[str, Comparison]:
    """FP8-LM's recipe with its moments or its weights in fewer bits, one change at a time."""
    o1 = get_recipe("fp8lm-o1")
    assert o1.codes is not None
    assert o1.codes.grads is not None
    e4m3, half = o1.codes.grads, o1.codes.weights
    e5m2 = get_storage(Quantizer(formats.get("e5m2"), scales=Scales(TENSOR, get_scaling("rceil"))))
    changed = {
        "first e4m3, second fp16": {"moments": (("exp_avg", e4m3), ("exp_avg_sq", half))},
        "second e5m2": {"moments": (("exp_avg_sq", e5m2),)},
        "second e4m3": {"moments": (("exp_avg_sq", e4m3),)},
        "master e4m3": {"codes": Codes(weights=e4m3, grads=e4m3)},
    }
    recipes = {"fp8lm-o1": o1}
    recipes |= {name: replace(o1, **fields) for name, fields in changed.items()}  # type: ignore[arg-type]
    experiment = experiment_for("lm", recipes=("fp8lm-o1",), steps=200, **_LEAN)
    return {"lm": Comparison(experiment, recipes, baseline="fp8lm-o1")}


def pairs() -> dict[str, Comparison]:
    """Fishman's recipe on a small Llama with float32 moments, and with each pair of FP8 formats for the two moments."""
    base = get_recipe("fp8-smooth-swiglu")
    current = Scales(TENSOR, get_scaling("current"))
    e4m3, e5m2 = (get_storage(Quantizer(formats.get(name), scales=current)) for name in ("e4m3", "e5m2"))
    formats_of = {"E4M3": e4m3, "E5M2": e5m2}
    recipes = {base.name: base}
    for first, m in formats_of.items():
        for second, v in formats_of.items():
            recipes[f"{first}, {second}"] = replace(base, moments=(("exp_avg", m), ("exp_avg_sq", v)))
    experiment = experiment_for("lm", recipes=(base.name,), model="llama-tiny", steps=200, **{**_LEAN, "seeds": 6})
    return {"lm": Comparison(experiment, recipes, baseline=base.name)}


def sums() -> dict[str, Comparison]:
    """Matmuls that accumulate in 16 bits, over up to 1024 terms (in weight gradients: 16 sequences of 64)."""
    return {"lm": named("lm", "fp32", "fp16-mixed", "fp16-accumulate", "bf16-accumulate", steps=300)}


WINDOW = (-6, -4, -2, 0, 4, 6, 8)
SIZES = {"small": (1, 32, 2), "large": (3, 128, 4)}
"""Layers, width and heads of the GPTs on which Graphcore's recipes are trained."""


def _constant(scaling: Scaling) -> Recipe:
    """fp8-cscale with another constant scale."""
    e4, e5 = (Quantizer(formats.get(f), scales=Scales(TENSOR, scaling)) for f in ("e4m3fnuz", "e5m2fnuz"))
    rules = (*KEEP, Rule("*", linear_spec(input=e4, weight=e4, grad_output=e5)))
    return replace(get_recipe("fp8-cscale"), rules=rules)


def window() -> dict[str, Comparison]:
    """fp16, the same with GEMMs in FP8 with one scale per tensor, and with one constant scale 2^c for all tensors, c
    swept."""
    amax = get_recipe("fp8-amax")
    recipes = {"fp16": replace(amax, rules=()), "fp8-amax": amax}
    recipes |= {f"c{c:+d}": _constant(get_scaling("fixed", bias=c)) for c in WINDOW}
    experiment = experiment_for("lm", recipes=("fp8-amax",), steps=150, **{**_LEAN, "seeds": 2})
    return {
        name: Comparison(experiment, recipes, partial(GPT, VOCABULARY, experiment.context, *size), baseline="fp16")
        for name, size in SIZES.items()
    }


def coat() -> dict[str, Comparison]:
    """COAT, with states, activations and GEMM operands in FP8, against bf16."""
    return {"lm": named("lm", "bf16-mixed", "coat", steps=200)}


def static() -> dict[str, Comparison]:
    """FP8 without scales in GPTs under munit scaling and u-muP, each at the best learning rate for its width."""
    munit = named("lm", "fp32", "munit-fp8", model="munit-gpt-tiny", lr=0.5)
    return {"munit": munit, "umup": named("lm", "fp32", "umup-fp8", model="unit-gpt-tiny", lr=2.0)}


def _recurrent(task: str, sizes: dict[str, Callable[[], nn.Module]], **given: Any) -> dict[str, Comparison]:
    """fp16 with a constant loss scale of 128 and without one, on recurrent models of several sizes."""
    scaled = replace(get_recipe("fp16-static"), loss_scale=LossScale(128.0, dynamic=False))
    recipes = {"fp32": get_recipe("fp32"), "S = 128": scaled, "unscaled": get_recipe("fp16-mixed-unscaled")}
    experiment = experiment_for(task, recipes=("fp32",), **{**_LEAN, **given})
    return {name: Comparison(experiment, recipes, build) for name, build in sizes.items()}


def lstm() -> dict[str, Comparison]:
    """A language model of two LSTM layers."""
    sizes = {f"width {width}": partial(LanguageModel, VOCABULARY, 2, width) for width in (64, 128)}
    return _recurrent("lm", sizes, batch=32, steps=200, lr=4e-3)


def translator() -> dict[str, Comparison]:
    """A translator of three LSTM layers with attention, between the lab's made-up languages."""
    sizes = {f"width {width}": partial(Translator, SOURCE_WORDS, TARGET_WORDS, 3, width) for width in (48, 96)}
    return _recurrent("translation", sizes, steps=300)


GROUPS: dict[str, Callable[[], dict[str, Comparison]]] = {
    "betas": betas,
    "masters": masters,
    "states": states,
    "pairs": pairs,
    "sums": sums,
    "window": window,
    "coat": coat,
    "static": static,
    "lstm": lstm,
    "translator": translator,
}


def main() -> None:
    """Train, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", metavar="NAME", choices=GROUPS, help=", ".join(GROUPS))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/ledger"))
    arguments = parser.parse_args()
    data: dict[str, Any] = {"machine": environment(), "comparisons": {}}
    for label, found in GROUPS[arguments.group]().items():
        experiment = found.experiment if arguments.steps is None else replace(found.experiment, steps=arguments.steps)
        losses = train(experiment, found.recipes, arguments.out / arguments.group / label, found.build)
        data["comparisons"][label] = {
            "experiment": experiment.to_dict() | {"recipes": list(found.recipes)},
            "baseline": found.baseline,
            "losses": losses,
            "summary": summary(losses, found.baseline),
        }
    for label, comparison in data["comparisons"].items():
        for name, row in comparison["summary"].items():
            print(label, name, row)
    if arguments.keep:
        keep(f"ledger_{arguments.group}", data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
