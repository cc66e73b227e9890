"""The speed of text generation by quantized models: whole generations, and single matrix-vector multiplications.

    python benchmarks/generation.py [--keep] [--rounds N]

--keep writes results/generation.json and the tables of docs/inference.md between `<!-- generation -->` marks.
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
import torchao.quantization
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import halfstep
from halfstep.lab.environment import environment
from halfstep.recipe import Recipe, Rule, linear_spec
from harness import RESULTS, keep, timings


PROMPT, NEW = 16, 64
RECIPES = ("fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "nf4", "int8-weight-only")
SHAPES = {"within": (2048, 2048), "beyond": (8192, 8192)}
"""Shapes of weights (out, in): `within`, whose bf16 values fit in the last-level cache (32 MB here), and `beyond`,
whose FP4 codes fill it."""
BARS = {"within": 1.3, "beyond": 1.0}
PAGE = RESULTS.parent.parent / "docs" / "inference.md"
TABLE = re.compile(r"(?<=<!-- generation -->\n).*?(?=<!-- end generation -->)", re.DOTALL)


def recipe_of(name: str) -> str | Recipe:
    """The name of a recipe as it is; for a quantizer's name, a recipe that only rounds weights with it."""
    if name in halfstep.list_recipes():
        return name
    quantizer = halfstep.quant.get_quantizer(name)
    return Recipe(name, "", "", rules=(Rule("*", linear_spec(None, quantizer, None)),))


def quantized(model: nn.Module, name: str) -> nn.Module:
    """A copy of the model, quantized for inference."""
    twin = copy.deepcopy(model)
    halfstep.quantize_model(twin, recipe_of(name))
    return twin


def peers() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Functions that quantize a model with other libraries, by name."""
    return {
        "bitsandbytes Linear4bit nf4": partial(_bitsandbytes, bits=4),
        "bitsandbytes Linear8bitLt": partial(_bitsandbytes, bits=8),
        "torchao Int8WeightOnly": partial(_torchao, name="Int8WeightOnlyConfig"),
        "torchao Float8WeightOnly": partial(_torchao, name="Float8WeightOnlyConfig"),
        "torchao Int4WeightOnly": partial(_torchao, name="Int4WeightOnlyConfig"),
    }


def _bitsandbytes(model: nn.Module, bits: int) -> nn.Module:
    def swapped(layer: nn.Linear) -> nn.Module:
        bias = layer.bias is not None
        if bits == 4:
            new = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias, quant_type="nf4", compute_dtype=layer.weight.dtype
            )
            new.weight = bnb.nn.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4")
        else:
            new = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, bias, has_fp16_weights=False)
            new.weight = bnb.nn.Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False)
        return new.to("cpu")

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, swapped(child))
    return model


def _torchao(model: nn.Module, name: str) -> nn.Module:
    def chosen(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and "lm_head" not in path

    torchao.quantization.quantize_(model, getattr(torchao.quantization, name)(), chosen)
    return model


def llama() -> LlamaForCausalLM:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def generate(model: Any, ids: Tensor) -> Tensor:
    """NEW greedy tokens after the prompt."""
    return model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)  # type: ignore[no-any-return]


def generations(rounds: int) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """By model: the median time of a generation in ms, and its ratio to the faster of fp32 and bf16; and by name the
    errors of peers that do not run."""
    whole, ids = llama(), torch.randint(512, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    models: dict[str, nn.Module] = {"fp32": whole, "bf16": copy.deepcopy(whole).bfloat16()}
    models |= {name: quantized(whole, name) for name in RECIPES}
    failed: dict[str, str] = {}
    for name, make in peers().items():
        try:
            model = make(copy.deepcopy(models["bf16"]))
            generate(model, ids)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
        else:
            models[name] = model
    return _rows(timings({name: partial(generate, model, ids) for name, model in models.items()}, rounds, 1)), failed


def products(where: str, rounds: int) -> dict[str, dict[str, float]]:
    """By recipe: the time of one linear layer on one vector in ms, and its ratio to the faster of fp32 and bf16."""
    out, shared = SHAPES[where]
    torch.manual_seed(0)
    layer = nn.Linear(shared, out, bias=False)
    x, weight = torch.randn(1, shared), layer.weight.detach()
    narrow, narrow_x = weight.bfloat16(), x.bfloat16()
    runs: dict[str, Callable[[], Any]] = {
        "fp32": lambda: F.linear(x, weight),
        "bf16": lambda: F.linear(narrow_x, narrow),
    }
    for name in RECIPES:
        runs[name] = partial(quantized(nn.Sequential(layer), name), x)
    with torch.inference_mode():
        return _rows(timings(runs, rounds, 2, span=0.02))


def _rows(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    best = [min(pair) for pair in zip(seconds["fp32"], seconds["bf16"], strict=True)]
    return {
        name: {
            "ms": 1000 * statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(found, best, strict=True)),
        }
        for name, found in seconds.items()
    }


def table(data: dict[str, Any]) -> str:
    """The tables of docs/inference.md."""
    heads = [f"{out} x {shared}, {where} the cache" for where, (out, shared) in SHAPES.items()]
    lines = [
        f"| weights | {NEW} tokens | ratio |", "| --- | --- | --- |",
        *(f"| {name} | {row['ms'] / 1000:.2f} s | {row['ratio']:.2f} |" for name, row in data["generation"].items()),
        *(f"| {name} | does not run here: {why} | |" for name, why in data["failed"].items()),
        "", f"| weights | {' | '.join(heads)} |", "| --- | --- | --- |",
    ]  # fmt: skip
    for name in data["products"]["within"]:
        cells = []
        for where in SHAPES:
            row, bar = data["products"][where][name], 2.0 if name == "nf4" else BARS[where]
            missed = f", above its bar of {bar:g}" if name not in ("fp32", "bf16") and row["ratio"] > bar else ""
            cells.append(f"{row['ms']:.2f} ms ({row['ratio']:.2f}{missed})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    machine = data["machine"]
    lines += ["", f"Measured with torch {machine['torch']} on {machine['cpu']}, {machine['threads']} threads."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    made, failed = generations(arguments.rounds)
    data = {"machine": environment(), "rounds": arguments.rounds, "generation": made, "failed": failed}
    data |= {"products": {where: products(where, 3 * arguments.rounds) for where in SHAPES}}
    print(table(data))
    if arguments.keep:
        keep("generation", data)
        PAGE.write_text(TABLE.sub(lambda _: table(data), PAGE.read_text()))


if __name__ == "__main__":
    main()
