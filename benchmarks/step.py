"""The time of a training step of a 10M-parameter GPT with halfstep, relative to plain torch loops of the same model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_
from unit_scaling.transforms import simulate_fp8

import halfstep
from halfstep import unit
from halfstep.lab.models.gpt import GPT, Attention
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Recipe, Rule
from harness import Contender, keeps, race, report


_TENSORWISE = {
    "torch.autocast bf16": 1.1,
    "torchao float8, emulated": 1 / 4,
    "unit-scaling simulate_fp8": 1 / 4,
    "torch fp32": 1 / 2,
    "halfstep bf16-mixed": None,
}
_BLOCKS = {"torch.autocast bf16": 1.3, "torchao mxfp8, emulated": 1 / 3, "halfstep bf16-mixed": None}
_TWICE, _NEARLY = {"halfstep bf16-mixed": 2.0}, {"halfstep bf16-mixed": 1.6}
RECIPES = {"fp8-current": _TENSORWISE, "fp8-delayed": _TENSORWISE, "mxfp8": _BLOCKS, "fp8-block": _BLOCKS}
RECIPES |= {"fp4-wang": _TWICE, "fp4-wang-msamp": _TWICE, "fp4-wang by histogram": _NEARLY}
# torchao has no MXFP4 training, and its NVFP4 training runs on GPUs alone: here, its emulated MXFP8 is the nearest.
RECIPES |= dict.fromkeys(("mxfp4", "nvfp4"), _NEARLY | {"torchao mxfp8, emulated": 1 / 5})
RECIPES |= dict.fromkeys(("mxfp4-rht", "fp4-zhou-dgrad-fp8", "fp4-zhou-dgrad-bf16"), _NEARLY)
"""The peers of each recipe, and at most what share of their time it should take."""
LAYERS, WIDTH, HEADS, CONTEXT, BATCH, ROUNDS = 6, 384, 6, 256, 8, 9


class Plain:
    """torch's functions under the names of their counterparts in `halfstep.unit`."""

    linear, gelu, layer_norm, embedding = map(staticmethod, (F.linear, F.gelu, F.layer_norm, F.embedding))
    cross_entropy, scaled_dot_product_attention = map(staticmethod, (F.cross_entropy, F.scaled_dot_product_attention))
    linear_readout = linear

    @staticmethod
    def residual_split(x: Tensor, *, ratio: float) -> tuple[Tensor, Tensor]:
        """The same tensor twice."""
        return x, x

    @staticmethod
    def residual_add(branch: Tensor, skip: Tensor, *, ratio: float) -> Tensor:
        """skip + branch."""
        return skip + branch


class Written(nn.Module):
    """A GPT written with either torch's functions or the unit-scaled ones."""

    def __init__(self, functions: Any) -> None:
        super().__init__()
        self.functions = functions
        sizes = {
            "qkv": (3 * WIDTH, WIDTH),
            "proj": (WIDTH, WIDTH),
            "up": (4 * WIDTH, WIDTH),
            "down": (WIDTH, 4 * WIDTH),
        }
        scale = 0.02 if functions is Plain else 1.0
        make = lambda *shape: nn.Parameter(torch.randn(*shape) * scale)  # noqa: E731
        self.tokens, self.places, self.head = make(256, WIDTH), make(CONTEXT, WIDTH), make(256, WIDTH)
        blocks = [nn.ParameterDict({name: make(*shape) for name, shape in sizes.items()}) for _ in range(LAYERS)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        f, (batch, time) = self.functions, tokens.shape
        x = f.embedding(tokens, self.tokens) + f.embedding(torch.arange(time), self.places)
        for block in self.blocks:
            branch, skip = f.residual_split(x, ratio=0.5)
            qkv = f.linear(f.layer_norm(branch, (WIDTH,)), block["qkv"])
            q, k, v = qkv.view(batch, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            branch = f.linear(mixed.transpose(1, 2).reshape(batch, time, WIDTH), block["proj"])
            x = f.residual_add(branch, skip, ratio=0.5)
            branch, skip = f.residual_split(x, ratio=0.5)
            branch = f.linear(f.gelu(f.linear(f.layer_norm(branch, (WIDTH,)), block["up"])), block["down"])
            x = f.residual_add(branch, skip, ratio=0.5)
        logits = f.linear_readout(f.layer_norm(x, (WIDTH,)), self.head)
        return f.cross_entropy(logits.flatten(0, 1), targets.flatten())


def written(functions: Any, tokens: Tensor) -> Callable[[], None]:
    """A function that runs a step of such a model in float32, with torch's fused AdamW."""
    model = Written(functions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class PlainAttention(Attention):
    """The same attention in plain torch."""

    def forward(self, x: Tensor) -> Tensor:
        """Attention by torch's scaled_dot_product_attention."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))


def plain(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None) -> Callable[[], None]:
    """A function that runs a step of a usual training loop: autocast around forward and loss, torch's fused AdamW."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attention.__class__ = PlainAttention
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_histogram(name: str) -> Recipe:
    """The recipe with the quantiles of its clamps estimated by histograms."""
    recipe = halfstep.get_recipe(name)

    def operand(quantizer: Quantizer | None) -> Quantizer | None:
        if quantizer is None or quantizer.clamp is None:
            return quantizer
        return replace(quantizer, clamp=replace(quantizer.clamp, estimate="histogram"))

    def rule(found: Rule) -> Rule:
        products = {field.name: getattr(found.linear, field.name) for field in fields(found.linear)}
        made = {key: replace(p, lhs=operand(p.lhs), rhs=operand(p.rhs)) for key, p in products.items()}
        return replace(found, linear=LinearSpec(**made))

    return replace(recipe, name=f"{name}-histogram", rules=tuple(map(rule, recipe.rules)))


def prepared(model: nn.Module, tokens: Tensor, recipe: str | Recipe) -> Callable[[], None]:
    """A function that runs a step of the same loop with halfstep.prepare."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)

    def step() -> None:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def adopted(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """A function that runs a step of the same loop in float32, with the model unit-scaled in place."""
    model = copy.deepcopy(model)
    halfstep.unit_scale(
        model, tokens[:, :-1], loss=lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def float8(model: nn.Module) -> nn.Module:
    """The model with torchao's float8 training, emulated, in every linear layer but the head."""
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=_but_the_head)
    return model


def mxfp8(model: nn.Module) -> nn.Module:
    """The model with torchao's MXFP8 training, emulated, in every linear layer but the head."""
    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    quantize_(model, config, filter_fn=_but_the_head)
    return model


def _but_the_head(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != "head"


def main() -> None:
    """Time one step of each, interleaved."""
    kept = keeps(__doc__)
    torch.manual_seed(0)
    model = GPT(256, CONTEXT, LAYERS, WIDTH, HEADS)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    contenders = [
        Contender("torch fp32", plain(model, tokens, None)),
        Contender("halfstep fp32", prepared(model, tokens, "fp32"), "torch fp32", 1.03),
        Contender("torch.autocast bf16", plain(model, tokens, torch.bfloat16)),
        Contender("halfstep bf16-mixed", prepared(model, tokens, "bf16-mixed"), "torch.autocast bf16", 1.03),
        Contender("halfstep bf16-stochastic", prepared(model, tokens, "bf16-stochastic"), "torch.autocast bf16"),
        Contender("halfstep fp16-mixed", prepared(model, tokens, "fp16-mixed"), "torch fp32"),
        # The peers' loops run without autocast: torch's own bf16 products would slow them down on a CPU without units.
        Contender("torchao float8, emulated", plain(float8(copy.deepcopy(model)), tokens, None), is_peer=True),
        Contender("torchao mxfp8, emulated", plain(mxfp8(copy.deepcopy(model)), tokens, None), is_peer=True),
        Contender("unit-scaling simulate_fp8", plain(simulate_fp8(copy.deepcopy(model)), tokens, None), is_peer=True),
    ]
    contenders += [
        Contender("written with torch", written(Plain, tokens)),
        Contender("written with halfstep.unit", written(unit, tokens), "written with torch", 1.05),
        Contender("halfstep.unit_scale", adopted(model, tokens), "torch fp32", 1.05),
    ]
    for recipe, bars in RECIPES.items():
        name = recipe.removesuffix(" by histogram")
        step = prepared(model, tokens, recipe if name == recipe else by_histogram(name))
        for peer, at_most in bars.items():
            contenders.append(Contender(f"halfstep {recipe}", step, peer, at_most))
    question = f"a step of a {size:.1f}M-parameter GPT, {BATCH} x {CONTEXT} tokens"
    report("step", question, race(contenders, ROUNDS), ROUNDS, kept)


if __name__ == "__main__":
    main()
