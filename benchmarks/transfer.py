"""Whether the best learning rate stays the same as a model grows wider. docs/parametrizations.md.

    python benchmarks/transfer.py [--only gpt,mlp] [--parametrizations umup] [--widths 64,128]
    python benchmarks/transfer.py --page

A GPT of 2 layers on the lab's text and an MLP of 4 matrices on its digits, under the standard parametrization, u-muP
and munit scaling, are trained with AdamW on a grid of learning rates of factor 2, extended until the least loss is not
at its edge. results/transfer.json stores every run, so that an interrupted search resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import unit
from halfstep.lab.environment import environment
from halfstep.lab.models.gpt import GPT, UnitGPT
from halfstep.lab.task import VOCABULARY, load_corpus, load_digits, stream
from halfstep.lab.tasks.lm import LanguageModelling
from harness import RESULTS, keep
from transfer_page import page


PARAMETRIZATIONS = ("standard", "umup", "munit")
HEAD, CONTEXT, BATCH = 32, 32, 8


@dataclass(frozen=True)
class Setting:
    """A kind of model, its data, training steps and widths."""

    make: Callable[[str, int], nn.Module]
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    """The inputs and classes of each step, for a seed."""
    held_out: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    warmup: int
    widths: tuple[int, ...]
    start: dict[str, int]
    """By parametrization, the power of two at which the search for the first width starts."""


# ---- models ---------------------------------------------------------------------------------------------------------


def _gpt(parametrization: str, width: int) -> nn.Module:
    if parametrization != "standard":
        return UnitGPT(VOCABULARY, CONTEXT, 2, width, width // HEAD, parametrization)
    model = GPT(VOCABULARY, CONTEXT, 2, width, width // HEAD)
    unit.set_roles(model, {"head.weight": "readout", "blocks.*.weight": "hidden", "*norm?.weight": "norm"})
    return _standard(model)


def _mlp(parametrization: str, width: int) -> nn.Module:
    sizes = [(64, width), (width, width), (width, width), (width, 10)]
    kinds = ("input", "hidden", "hidden", "readout")
    layers: list[nn.Module] = []
    for (inputs, outputs), kind in zip(sizes, kinds, strict=True):
        if parametrization == "standard":
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        else:
            constraint = unit.SAME if parametrization == "munit" else "none" if kind == "readout" else "to_output"
            layers += [unit.Linear(inputs, outputs, bias=True, role=kind, constraint=constraint), unit.ReLU()]
    model = nn.Sequential(*layers[:-1])
    if parametrization == "standard":
        unit.set_roles(model, {f"{2 * n}.weight": kind for n, kind in enumerate(kinds)})
        return _standard(model)
    return _UnitLogits(model)


class _UnitLogits(nn.Module):
    """A model whose logits' gradient is scaled to unit size, as in `UnitGPT`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        rows, classes = logits.shape
        return unit.scale_backward(logits, rows * classes / (classes - 1) ** 0.5)


def _standard(model: nn.Module) -> nn.Module:
    """The model with matrices from N(0, 1 / fan_in) and zero biases; the GPT's embeddings stay as in GPT-2, at 0.02."""
    rule = unit.get_parametrization("standard")
    roles = unit.roles(model)
    for name, parameter in model.named_parameters():
        if roles[name].kind in ("input", "hidden", "readout"):
            nn.init.normal_(parameter, std=rule.init(roles[name]))
        elif roles[name].kind == "bias":
            nn.init.zeros_(parameter)
    return model


# ---- data -----------------------------------------------------------------------------------------------------------


def _text() -> LanguageModelling:
    return LanguageModelling(load_corpus(None, CONTEXT), BATCH, CONTEXT, validation_batches=16)


def _text_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    task = _text()
    for step in range(1, SETTINGS["gpt"].steps + 1):
        batch = task.batch(seed, step)
        yield batch["tokens"], batch["targets"]


def _text_held_out() -> tuple[Tensor, Tensor]:
    batches = _text().held_out()
    return torch.cat([b["tokens"] for b in batches]), torch.cat([b["targets"] for b in batches])


def _images(which: int) -> tuple[Tensor, Tensor]:
    parts = load_digits()
    mean, std = parts[0].images.mean(), parts[0].images.std()
    return ((parts[which].images - mean) / std).reshape(-1, 64), parts[which].classes


def _image_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    images, classes = _images(0)
    for step in range(1, SETTINGS["mlp"].steps + 1):
        which = torch.randint(0, len(images), (128,), generator=stream(seed, step))
        yield images[which], classes[which]


SETTINGS = {
    "mlp": Setting(
        _mlp, _image_batches, lambda: _images(0), 30, 3, (64, 128, 256, 512, 1024, 2048),
        {"standard": -7, "umup": -1, "munit": -1},
    ),
    "gpt": Setting(
        _gpt, _text_batches, _text_held_out, 100, 10, (64, 128, 256, 512),
        {"standard": -7, "umup": 0, "munit": 0},
    ),
}  # fmt: skip


# ---- training -------------------------------------------------------------------------------------------------------


def _loss(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    logits = model(inputs)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), classes.reshape(-1))


def _optimizer(model: nn.Module, parametrization: str, lr: float) -> torch.optim.Optimizer:
    groups = unit.parameter_groups(model, torch.optim.AdamW, lr=lr, parametrization=parametrization, decay="coupled")
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def _trained(name: str, parametrization: str, width: int, lr: float, seed: int, steps: int | None = None) -> nn.Module:
    """The trained model, with a linear warm-up and a linear decay to zero; with `steps`, after the first few steps at a
    constant learning rate."""
    setting = SETTINGS[name]
    torch.manual_seed(seed)
    model = setting.make(parametrization, width)
    optimizer = _optimizer(model, parametrization, lr)

    def factor(step: int) -> float:
        if steps is not None:
            return 1.0
        return min((step + 1) / setting.warmup, (setting.steps - step) / (setting.steps - setting.warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for number, (inputs, classes) in enumerate(setting.batches(seed)):
        if number == steps:
            break
        loss = _loss(model, inputs, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if not math.isfinite(float(loss.detach())):
            break
    return model


def final(name: str, parametrization: str, width: int, lr: float, seed: int) -> float | None:
    """The final loss: the GPT's on held-out text, the MLP's on its training data. None if it diverged."""
    model = _trained(name, parametrization, width, lr, seed)
    with torch.no_grad():
        loss = float(_loss(model.eval(), *SETTINGS[name].held_out()))
    return loss if math.isfinite(loss) else None


def sizes(name: str, parametrization: str, width: int, lr: float, steps: int) -> dict[str, float]:
    """The root mean squares of the outputs of the last hidden matrix and of the readout, after some steps at a constant
    learning rate."""
    found: dict[str, float] = {}
    model = _trained(name, parametrization, width, lr, 0, steps)
    kinds = {n: role.kind for n, role in unit.roles(model).items()}
    for path, module in model.named_modules():
        kind = kinds.get(f"{path}.weight")
        if kind in ("input", "hidden", "readout"):
            module.register_forward_hook(
                lambda _module, _args, out, at=path: found.update({at: float(out.detach().pow(2).mean().sqrt())})
            )
    with torch.no_grad():
        _loss(model.eval(), *SETTINGS[name].held_out())
    return {"hidden": list(found.values())[-2], "readout": list(found.values())[-1]}


# ---- the search -----------------------------------------------------------------------------------------------------


class Runs:
    """All runs by name, stored in results/transfer.json."""

    def __init__(self) -> None:
        path = RESULTS / "transfer.json"
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}, "sizes": {}}

    def keep(self) -> None:
        keep("transfer", {**self.data, "machine": environment()})

    def loss(self, name: str, parametrization: str, width: int, power: int, seed: int) -> float:
        """The final loss of a run, trained if it is missing; infinite if it diverged."""
        key = f"{name} {parametrization} {width} 2^{power} seed {seed}"
        if key not in self.data["runs"]:
            began = time.perf_counter()
            self.data["runs"][key] = final(name, parametrization, width, 2.0**power, seed)
            print(f"{key}: {self.data['runs'][key]} ({time.perf_counter() - began:.1f} s)", flush=True)
            self.keep()
        loss = self.data["runs"][key]
        return math.inf if loss is None else loss

    def best(self, name: str, parametrization: str, width: int, start: int, most: int) -> int:
        """The power of two with the least mean loss, with both neighbours measured: searched with one seed first, then
        with more seeds from there."""
        power = start
        for seeds in range(1, most + 1):
            while True:
                means = {
                    p: sum(self.loss(name, parametrization, width, p, seed) for seed in range(seeds)) / seeds
                    for p in (power - 1, power, power + 1)
                }
                least = min(means, key=lambda p: (means[p], abs(p - power)))
                if least == power:
                    break
                power = least
        return power

    def size(self, name: str, parametrization: str, width: int, power: int) -> None:
        for steps in (0, 10):
            key = f"{name} {parametrization} {width} 2^{power} after {steps}"
            if key not in self.data["sizes"]:
                self.data["sizes"][key] = sizes(name, parametrization, width, 2.0**power, steps)
                print(f"{key}: {self.data['sizes'][key]}", flush=True)
                self.keep()


CHECKED = {"mlp": {"standard": -7, "umup": -3, "munit": -3}, "gpt": {"standard": -7, "umup": -1, "munit": -1}}
"""The learning rates of the coordinate check as powers of two, the same at every width."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--only", default=",".join(SETTINGS))
    arguments.add_argument("--parametrizations", default=",".join(PARAMETRIZATIONS))
    arguments.add_argument("--widths", default="", help="of those that a model has; all of them if left out")
    arguments.add_argument("--seeds", type=int, default=2, help="at the best learning rate and its two neighbours")
    arguments.add_argument("--page", action="store_true")
    given = arguments.parse_args()
    runs = Runs()
    if not given.page:
        for name in given.only.split(","):
            for parametrization in given.parametrizations.split(","):
                power = SETTINGS[name].start[parametrization]
                for width in SETTINGS[name].widths:
                    if given.widths and str(width) not in given.widths.split(","):
                        power = runs.data["best"].get(f"{name} {parametrization} {width}", power)
                        continue
                    runs.size(name, parametrization, width, CHECKED[name][parametrization])
                    power = runs.best(name, parametrization, width, power, given.seeds)
                    print(f"{name} {parametrization} {width}: best 2^{power}", flush=True)
                    runs.data.setdefault("best", {})[f"{name} {parametrization} {width}"] = power
                    runs.keep()
    page(runs.data)


if __name__ == "__main__":
    main()
