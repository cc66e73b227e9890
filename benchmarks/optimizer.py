"""The time of low-bit optimizer steps and the bytes of their states, against other libraries in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import nn

import halfstep
from halfstep import formats
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import Recipe, Storage, get_recipe, get_storage
from harness import Contender, keeps, race, report


TENSORS, SHAPE, ROUNDS = 8, (2048, 1024), 15
RECIPES = {
    "fp32": None, "bf16-stochastic": 2.0, "bf16-nomaster": None, "bf16-master": None, "bf16-pure": None,
    "bf16-split": 1.5, "bf16-kahan": 1.5, "bf16-collage-light": 1.5, "bf16-collage-plus": 1.5, "adamw-8bit": None,
}  # fmt: skip


class Weights(nn.Module):
    """A module of a few large parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(SHAPE)) for _ in range(TENSORS)])

    def with_gradients(self) -> Weights:
        for weight in self.weights:
            weight.grad = torch.randn(SHAPE).to(weight.dtype)
        return self


def blocks(format: str) -> Storage:
    """Storage in a format in blocks of 256."""
    return get_storage(Quantizer(formats.get(format), scales=Scales(Tile(1, 256), get_scaling("absmax"))), flat=True)


def of_tensor(format: str, rule: str) -> Storage:
    """Storage in a format with one scale per tensor."""
    return get_storage(Quantizer(formats.get(format), scales=Scales(TENSOR, get_scaling(rule))))


def with_storages(first: Storage, second: Storage) -> Recipe:
    """fp32 with the moments in these storages."""
    return replace(get_recipe("fp32"), name="moments", moments=(("exp_avg", first), ("exp_avg_sq", second)))


def coat_moments() -> Recipe:
    """fp32 with the moments of the recipe `coat`."""
    return replace(get_recipe("fp32"), name="moments", moments=get_recipe("coat").moments)


@dataclass
class Step:
    """A step of an optimizer that is created at the first call, so that an uninstalled library fails there."""

    made: Callable[[], torch.optim.Optimizer]
    optimizer: torch.optim.Optimizer | None = None

    def __call__(self) -> object:
        if self.optimizer is None:
            self.optimizer = self.made()
        return self.optimizer.step()

    def state_bytes(self) -> float:
        """Bytes per parameter of all the optimizer's state: moments, masters, scales, projectors."""
        assert self.optimizer is not None
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(map(live_bytes, kept)) / (TENSORS * SHAPE[0] * SHAPE[1])


def live_bytes(value: object) -> int:
    """The bytes of a state's tensors, including those inside tensor subclasses and objects."""
    if not isinstance(value, torch.Tensor):
        return sum(map(live_bytes, vars(value).values())) if hasattr(value, "__dict__") else 0
    if hasattr(value, "__tensor_flatten__"):
        return sum(live_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size()


def stepping(recipe: str | Recipe | None) -> Step:
    """The step of torch's fused AdamW (None) or of a recipe's optimizer."""
    model = Weights()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=recipe is None)
    if recipe is not None:
        _, optimizer, _ = halfstep.prepare(model, optimizer, recipe)
    model.with_gradients()
    return Step(lambda: optimizer)


MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters, **how: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, **how),
    "NAdam": lambda parameters, **how: torch.optim.NAdam(parameters, lr=1e-4, **how),
    "RMSprop": lambda parameters, **how: torch.optim.RMSprop(parameters, lr=1e-4, **how),
    "Adagrad": lambda parameters, **how: torch.optim.Adagrad(parameters, lr=1e-4, **how),
    "Lion": lambda parameters: halfstep.optim.Lion(parameters, lr=1e-4),
    "LAMB": lambda parameters: halfstep.optim.Lamb(parameters, lr=1e-4, weight_decay=0.01),
}
"""Constructors of the other update rules' optimizers, by name."""


def of_rule(name: str) -> Step:
    """The step of an update rule under fp32."""
    model = Weights()
    _, optimizer, _ = halfstep.prepare(model, MAKES[name](model.parameters()), "fp32")
    model.with_gradients()
    return Step(lambda: optimizer)


class ForeachLion(torch.optim.Optimizer):
    """Lion with foreach operations, as torch's optimizers are written: torch has none."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One step."""
        weights = self.param_groups[0]["params"]
        grads = [weight.grad for weight in weights]
        means = [self.state[weight].setdefault("exp_avg", torch.zeros_like(weight)) for weight in weights]
        blend = torch._foreach_mul(means, 0.9)
        torch._foreach_add_(blend, grads, alpha=0.1)
        torch._foreach_sign_(blend)
        torch._foreach_add_(weights, blend, alpha=-1e-4)
        torch._foreach_lerp_(means, grads, 0.01)


class ForeachLamb(torch.optim.Optimizer):
    """LAMB with foreach operations."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One step."""
        weights = self.param_groups[0]["params"]
        grads = [weight.grad for weight in weights]
        means = [self.state[weight].setdefault("exp_avg", torch.zeros_like(weight)) for weight in weights]
        squares = [self.state[weight].setdefault("exp_avg_sq", torch.zeros_like(weight)) for weight in weights]
        self.number = getattr(self, "number", 0) + 1
        torch._foreach_lerp_(means, grads, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, grads, grads, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - 0.999**self.number) ** 0.5)
        torch._foreach_add_(roots, 1e-6)
        directions = torch._foreach_div(means, roots)
        torch._foreach_div_(directions, 1 - 0.9**self.number)
        torch._foreach_add_(directions, weights, alpha=0.01)
        ratios = torch._foreach_div(torch._foreach_norm(weights), torch._foreach_norm(directions))
        torch._foreach_mul_(directions, ratios)
        torch._foreach_add_(weights, directions, alpha=-1e-4)


_FOREACH: dict[str, type[torch.optim.Optimizer]] = {"Lion": ForeachLion, "LAMB": ForeachLamb}


def of_torch(name: str) -> Step:
    """The step of torch's own optimizer: fused for SGD, else foreach."""
    parameters = Weights().with_gradients().parameters()
    if name in _FOREACH:
        return Step(lambda: _FOREACH[name](parameters, {}))
    return Step(lambda: MAKES[name](parameters, **{"fused" if name == "SGD" else "foreach": True}))


def theirs(module: str, name: str) -> Step:
    """The step of a library's AdamW, by module and class name."""
    return Step(lambda: getattr(import_module(module), name)(Weights().with_gradients().parameters(), lr=1e-4))


def projected(module: str, name: str) -> Step:
    """The step of an AdamW with gradients projected to a subspace, which is recomputed every 200 steps: not within the
    timed ones."""

    def made() -> torch.optim.Optimizer:
        group = {"params": list(Weights().with_gradients().parameters()), "rank": 128}
        usual = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
        found: torch.optim.Optimizer = getattr(import_module(module), name)([group | usual], lr=1e-4)
        return found

    return Step(made)


def main() -> None:
    """Time one step of each, interleaved."""
    kept = keeps(__doc__)
    torch.manual_seed(0)
    fused, bits, fp8 = "torch fused AdamW, fp32", "bitsandbytes AdamW8bit", "torchao AdamWFp8"
    galore, galore8 = "galore-torch GaLoreAdamW", "galore-torch GaLoreAdamW8bit"
    contenders = [Contender(fused, stepping(None))]
    contenders += [
        Contender(bits, theirs("bitsandbytes.optim", "AdamW8bit"), fused, is_peer=True),
        Contender(fp8, theirs("torchao.optim", "AdamWFp8"), fused, is_peer=True),
        Contender("torchao AdamW8bit", theirs("torchao.optim", "AdamW8bit"), fused, is_peer=True),
        Contender(galore, projected("galore_torch", "GaLoreAdamW"), fused, is_peer=True),
        Contender(galore8, projected("galore_torch", "GaLoreAdamW8bit"), fused, is_peer=True),
    ]
    contenders += [Contender(name, stepping(name), fused, bar) for name, bar in RECIPES.items()]
    eight, moments = stepping("adamw-8bit"), stepping(with_storages(blocks("e4m3fn"), blocks("e5m2")))
    fishman = with_storages(of_tensor("e4m3fn", "current"), of_tensor("e5m2", "current"))
    fp8lm = with_storages(of_tensor("e4m3fn", "rceil"), of_tensor("fp16", "rceil"))
    contenders += [
        Contender("E4M3 and E5M2 moments", moments, fused, 1.15),
        Contender("E4M3 and E5M2 moments, to torchao", moments, fp8, 0.25),
        Contender("adamw-8bit, to bitsandbytes", eight, bits, 1 / 6),
        Contender("E4M3 twice, as torchao keeps them: fp8-adam", stepping("fp8-adam"), fused),
        Contender("E4M3 and E5M2, a scale a tensor: Fishman's", stepping(fishman), fused),
        Contender("E4M3 and scaled fp16: FP8-LM's", stepping(fp8lm), fused),
        Contender("E4M3 expanded in groups of 128: coat", stepping(coat_moments()), fused, 4.0),
    ]
    for name in ("GaLoreAdamW", "GaLoreAdamW8bit"):
        ours = projected("halfstep.optim", name)
        contenders += [Contender(name, ours, fused), Contender(f"{name}, to galore-torch's", ours, galore)]
    for name in MAKES:
        peer = f"torch {'fused' if name == 'SGD' else 'foreach'} {name}"
        contenders.append(Contender(peer, of_torch(name), fused, is_peer=True))
        contenders.append(Contender(f"{name}, to torch's", of_rule(name), peer, 1.1 if name == "SGD" else 1.0))
    size = TENSORS * SHAPE[0] * SHAPE[1] / 2**20
    rows = race(contenders, ROUNDS)
    steps = {contender.name: contender.run for contender in contenders}
    for row in rows:
        step = steps[row["name"]]
        if "failed" not in row and isinstance(step, Step):
            row["state_bytes"] = step.state_bytes()
    report("optimizer", f"an AdamW step over {size:.0f}Mi parameters in {TENSORS} tensors", rows, ROUNDS, kept)


if __name__ == "__main__":
    main()
