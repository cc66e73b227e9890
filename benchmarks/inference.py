"""The cost and the error of models quantized for inference: bytes, the time of a prompt, the error of logits.

    python benchmarks/inference.py [--keep] [--steps N]

--keep writes results/inference.json and the table of docs/inference.md. generation.py times token-by-token
generation.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import halfstep
from halfstep.lab.environment import environment
from halfstep.lab.models.llama import Llama
from halfstep.lab.task import VOCABULARY
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.memory import stored_bytes
from harness import RESULTS, keep, ratio, timings


WIDE = {"fp32": "fp32", "bf16": "bf16-pure"}  # as stored; the others are quantized
RECIPES = ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "fp8-amax", "mxfp8", "nf4", "int8-weight-only")
PAGE = RESULTS.parent.parent / "docs" / "inference.md"
TABLE = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end -->)", re.DOTALL)


def inference_form(model: nn.Module, name: str) -> nn.Module:
    """A copy of the model in the precision that a row names."""
    twin = copy.deepcopy(model)
    if name in WIDE:
        halfstep.apply(twin, WIDE[name])
        return twin.eval()
    halfstep.quantize_model(twin, name)
    return twin


def trained(steps: int) -> tuple[nn.Module, Any]:
    """llama-tiny after some steps in fp32, and its task."""
    task = get_task("lm").open(experiment_for("lm", recipes=("fp32",)))
    torch.manual_seed(0)
    model = task.models()["llama-tiny"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        batch = task.batch(0, step)
        F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, task


@torch.no_grad()
def errors(model: nn.Module, task: Any) -> dict[str, dict[str, float]]:
    """By row: bits per byte on held-out text, and the relative error of the logits to fp32's."""
    batches = task.held_out()
    found: dict[str, dict[str, float]] = {}
    expected: list[Tensor] = []
    for name in (*WIDE, *RECIPES):
        each = inference_form(model, name)
        logits = [each(batch["tokens"]) for batch in batches]
        expected = expected or logits
        far = sum(float((a - b).square().sum()) for a, b in zip(logits, expected, strict=True))
        losses = [
            F.cross_entropy(y.flatten(0, 1), b["targets"].flatten()) for y, b in zip(logits, batches, strict=True)
        ]
        found[name] = {
            "error": math.sqrt(far / sum(float(b.square().sum()) for b in expected)),
            "bits_per_byte": float(torch.stack(losses).mean()) / math.log(2),
        }
    return found


def costs(rounds: int) -> dict[str, dict[str, float]]:
    """By row, for llama-small: bytes in memory and on disk, and the time of a prompt of 256 tokens."""
    torch.manual_seed(0)
    model = Llama(VOCABULARY, 256, layers=6, width=384, heads=6)
    forms = {name: inference_form(model, name) for name in (*WIDE, *RECIPES)}
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, each in forms.items():
            file = Path(folder) / f"{name}.safetensors"
            save_file(each.state_dict(), file)
            found[name] = {"memory": stored_bytes(each), "disk": file.stat().st_size}
        seconds = timings({name: partial(each, torch.arange(256)[None]) for name, each in forms.items()}, rounds)
    for name in forms:
        found[name]["prompt_ms"] = 1000 * statistics.median(seconds[name])
        found[name]["prompt_to_bf16"] = ratio(seconds, name, "bf16")
    return found


def table(data: dict[str, Any]) -> str:
    """The table of docs/inference.md."""
    lines = [
        "| weights | in memory | on disk | 256 tokens | logits' error | bits a byte |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, cost in data["costs"].items():
        quality = data["errors"][name]
        lines.append(
            f"| `{name}` | {cost['memory'] / 1e6:.1f} MB | {cost['disk'] / 1e6:.1f} MB | "
            f"{cost['prompt_ms']:.0f} ms ({cost['prompt_to_bf16']:.2f}) | "
            f"{quality['error']:.2%} | {quality['bits_per_byte']:.4f} |"
        )
    machine = data["machine"]
    lines += ["", f"Measured with torch {machine['torch']} on {machine['cpu']}, {machine['threads']} threads."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--steps", type=int, default=200, help="of llama-tiny, before its errors are measured")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    data = {"machine": environment(), "steps": arguments.steps, "rounds": arguments.rounds}
    data |= {"errors": errors(*trained(arguments.steps)), "costs": costs(arguments.rounds)}
    print(table(data))
    if arguments.keep:
        keep("inference", data)
        PAGE.write_text(TABLE.sub(lambda _: table(data), PAGE.read_text()))


if __name__ == "__main__":
    main()
