"""A way of using a prepared model, tried under every recipe: the definition of a row of docs/using.md, and how to run
it."""

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import halfstep
from halfstep.recipe import get_recipe
from tiny import EVERY, SMOOTH, batch, model_for


CORE = ("bf16-mixed", "fp16-master", "bf16-stochastic", "fp8-delayed")
REST = tuple(name for name in EVERY if name not in CORE)
ROUNDING = {
    name for name in EVERY if any(rule.linear.rounds for rule in get_recipe(name).rules)
}  # recipes that round operands of matmuls
FOUR_BITS = {n for n in ROUNDING if any(q.format.bits == 4 for r in get_recipe(n).rules for q in r.linear.quantizers)}
MUST = {name for name in EVERY if name.endswith(("-mixed", "-master", "-nomaster"))}
MUST |= {"fp32", "fp16-mixed-unscaled", "bf16-stochastic", "fp8-current", "fp8-delayed"}
ROUNDED = 1e-5  # any rounding gives a larger distance from fp32, and float32's orders of summation a smaller one
NOWHERE = 0.9  # a model that does not change has a distance of 1
WRONG = "**wrong**"
SLOW = (pytest.mark.slow,)
OUTCOMES = Path(__file__).with_name("outcomes.json")


class StockFailsToo(Exception):
    """Stock torch fails in this way too, as the way has checked."""


@dataclass(frozen=True)
class Way:
    """One way of use: `run(name)` asserts that it works under a recipe, or raises the error that refuses it."""

    title: str
    how: str
    run: Callable[[str], None]
    may_refuse: frozenset[str]
    """Recipes that must work in every way, but need not in this one."""


def way(
    may_refuse: Iterable[str] = (), core: tuple[str, ...] = CORE
) -> Callable[[Callable[[str], None]], Callable[..., None]]:
    """Make a test of a function of a recipe's name, whose docstring is `Title: how to do it.`

    Args: may_refuse: recipes that must work in every way, but need not in this one. core: recipes of the fast test; the
    others are slow tests."""

    def register(run: Callable[[str], None]) -> Callable[..., None]:
        title, _, how = " ".join((run.__doc__ or "").split()).partition(": ")
        found = Way(title, how, run, frozenset(may_refuse))

        rest = tuple(name for name in EVERY if name not in core)

        @pytest.mark.parametrize("names", [pytest.param(core, id="core"), pytest.param(rest, id="rest", marks=SLOW)])
        def test(names: tuple[str, ...]) -> None:
            recorded = json.loads(OUTCOMES.read_text()).get(title)
            assert recorded is not None, f"{title!r} is not in docs/using.md: run tests/uses/table.py --write"
            refused = outcomes(found, names)
            assert refused == {name: recorded[name] for name in names if name in recorded}

        test.way = found  # type: ignore[attr-defined]
        test.__doc__ = run.__doc__
        return test

    return register


def outcomes(way: Way, names: Iterable[str]) -> dict[str, str]:
    """The reasons of the recipes that refuse this way; recipes that work are left out.

    Raises: AssertionError: names the recipes with wrong results, with another error, or with a refusal that is not
    allowed."""
    refused, wrong, first = {}, [], None
    for name in names:
        torch.manual_seed(0)
        try:
            way.run(name)
        except halfstep.HalfstepError as error:
            refused[name] = sentence(str(error))
            if name in MUST - way.may_refuse:
                wrong.append(f"{name} must work, and refuses: {error}")
                first = first or error
        except StockFailsToo as error:
            refused[name] = f"stock torch fails too: {sentence(str(error))}"
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error).strip()[:600]}")
            first = first or error
    if wrong:
        raise AssertionError(f"{way.title}:\n" + "\n".join(wrong)) from first
    return refused


def sentence(message: str) -> str:
    """The first sentence of a message, on one line."""
    return " ".join(message.split(". ")[0].split(";")[0].split()).rstrip(".:")


class Stock:
    """A scaler for a stock loop in float32, without a loss scale."""

    def scale(self, loss):
        return loss

    def unscale_(self, optimizer):
        pass

    def clip_grad_norm_(self, optimizer, max_norm):
        return torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_norm)

    def step(self, optimizer, *args):
        return optimizer.step(*args)

    def update(self):
        pass


def sgd(model, lr=0.1, momentum=0.9, **options):
    """SGD, whose updates are proportional to gradients; Adam's first ones are signs, which hide factors and show
    noise."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum, **options)


def under(name):
    """The recipe, modified so that its update is plain SGD: GaLore's projection has full rank and scale 1, and
    estimators, which shrink a weight's gradient to 0.6, are removed."""
    recipe = get_recipe(name)
    if recipe.projection is not None:
        return replace(recipe, projection=replace(recipe.projection, rank=10**6, share=1.0, scale=1.0))
    if any(rule.linear.estimates for rule in recipe.rules):
        return replace(
            recipe,
            rules=tuple(
                replace(rule, linear=straight(rule.linear)) if rule.linear.estimates else rule for rule in recipe.rules
            ),
        )
    return recipe


def straight(spec):
    """A rule's matmuls without the weight's estimator: gradients pass straight through its rounding."""
    output, grad_input = (
        replace(product, rhs=replace(product.rhs, estimator=None)) for product in (spec.output, spec.grad_input)
    )
    return replace(spec, output=output, grad_input=grad_input)


def prepare(name, model, optimizer=None, **options):
    prepared = halfstep.prepare(model, optimizer or sgd(model), recipe=under(name), **{"generator": 3, **options})
    return settled(*prepared)


def settled(model, optimizer, scaler):
    """Lower a dynamic loss scale to where it would settle; else its first steps would be skipped, unlike stock
    fp32's."""
    if scaler.is_enabled() and scaler.get_scale() > 2.0**10:
        scaler.update(2.0**10)
    return model, optimizer, scaler


def step(model, optimizer, scaler, x, y, loss_of=F.mse_loss):
    """One step of the documented loop; returns the loss."""
    loss = loss_of(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


def steps(model, optimizer, scaler, times=4, first=0):
    """Steps of the documented loop on batches numbered from `first`; returns the losses."""
    return [step(model, optimizer, scaler, *batch(seed)) for seed in range(first, first + times)]


def values(model):
    """The floating-point values of a model's state dict in float32."""
    return {key: v.detach().float().clone() for key, v in model.state_dict().items() if v.is_floating_point()}


def start_of(name, make=None):
    """A model from a fixed seed, without a recipe."""
    return make() if make is not None else model_for(name)


def both(name, loop, make=None, optimizer=sgd):
    """The model's values before, after `loop(model, optimizer, scaler)` under the recipe, and after it in stock
    fp32."""
    stock = start_of(name, make)
    model = copy.deepcopy(stock)
    start = values(stock)
    model, low_bit, scaler = prepare(name, model, optimizer(model))
    torch.manual_seed(1)
    loop(model, low_bit, scaler)
    torch.manual_seed(1)
    loop(stock, optimizer(stock), Stock())
    return start, values(model), values(stock)


def relative_distance(found, expected, start=None):
    """The distance of two states, relative to the distance of the expected one from the start."""
    assert found.keys() == expected.keys()
    start = start or {key: torch.zeros_like(value) for key, value in expected.items()}
    far = torch.cat([(found[key] - expected[key]).flatten() for key in expected]).norm()
    return float(far / torch.cat([(expected[key] - start[key]).flatten() for key in expected]).norm())


def tolerance(name):
    """The largest relative distance from fp32 after a few steps of the documented loop: twice what is seen."""
    if name in SMOOTH:
        return 0.35  # gradients of two mantissa bits, rounded stochastically
    if name in FOUR_BITS:
        return 0.5
    return 0.0 if name == "fp32" else 0.15 if name in ROUNDING and name != "bf16-truncate" else 0.04


def assert_outputs_near(name, found, stock):
    """Outputs with and without rounded operands, for the same weights, differ by at most 0.2, in 4 bits 0.7: twice what
    is seen."""
    torch.testing.assert_close(found, stock, rtol=0.1, atol=0.7 if name in FOUR_BITS else 0.2)


def assert_near_fp32(name, start, found, expected, slack=1.0):
    """The values are within the recipe's rounding of stock fp32's, and differ from them if the recipe rounds."""
    distance = relative_distance(found, expected, start)
    most = min(slack * tolerance(name), NOWHERE)
    assert distance <= max(most, 2e-6), f"{distance:.4f} of the way from fp32"
    assert distance > ROUNDED or name == "fp32", "nothing was rounded"
