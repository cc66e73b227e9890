"""CPU time of forward and backward of transformers' experts under recipes, relative to its own code in bf16.

    python benchmarks/experts.py [--keep]

Medians of paired ratios, interleaved in one process, one thread; two experts per token. transformers' own code is
`grouped_mm`, with weights and inputs in bf16. --keep writes results/experts.json and the table of docs/recipes.md
between `<!-- experts -->` marks.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import halfstep
from halfstep.lab.environment import environment
from harness import RESULTS, keep, keeps


RECIPES = ("fp8-current", "fp8-rowwise", "fp8-block", "mxfp8")
SIZES = ((8, 128, 512, 1024), (64, 128, 128, 1024), (128, 256, 64, 512))  # experts, width, inner width, tokens
ROUNDS, SLOTS = 9, 2
PAGE = RESULTS.parent.parent / "docs" / "recipes.md"
TABLE = re.compile(r"(?<=<!-- experts -->\n).*?(?=<!-- end experts -->)", re.DOTALL)


class Mixture(nn.Module):
    """A model of one stack of experts, to which recipes can be applied."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        config = Qwen3MoeConfig(hidden_size=width, moe_intermediate_size=inner, num_experts=experts)
        config._experts_implementation = "grouped_mm"
        self.experts = Qwen3MoeExperts(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(x, index, weights)  # type: ignore[no-any-return]


def seconds(call: Callable[[], None]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def ratios(experts: int, width: int, inner: int, tokens: int) -> dict[str, float]:
    """The CPU time of each recipe relative to stock bf16, as medians over rounds."""
    torch.manual_seed(0)
    stock, x = Mixture(experts, width, inner), torch.randn(tokens, width)
    index, weights = torch.rand(tokens, experts).topk(SLOTS).indices, torch.rand(tokens, SLOTS)

    def passes(model: Mixture, dtype: torch.dtype) -> Callable[[], None]:
        given = x.to(dtype).requires_grad_()
        return lambda: model(given, index, weights.to(dtype)).float().square().sum().backward()

    calls = {"stock": passes(copy.deepcopy(stock).bfloat16(), torch.bfloat16)}
    for name in RECIPES:
        model = copy.deepcopy(stock)
        halfstep.apply(model, name)
        calls[name] = passes(model, torch.float32)
    rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(ROUNDS + 1)][1:]
    return {name: median(each[name] / each["stock"] for each in rounds) for name in RECIPES}


def table(data: dict[str, Any]) -> str:
    """The table of CPU time ratios, one row per size."""
    lines = [f"| experts, width, inner width, tokens | {' | '.join(f'`{name}`' for name in RECIPES)} |"]
    lines.append("| --- |" + " --- |" * len(RECIPES))
    for row in data["rows"]:
        cells = [f"{row['ratios'][name]:.1f}" for name in RECIPES]
        lines.append(f"| {', '.join(map(str, row['sizes']))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def trained(data: dict[str, Any]) -> str:
    """The table of `halfstep compare`'s verdicts for moe-tiny, one row per recipe, fp32 first."""
    lines = ["| recipe | verdict | final loss | to fp32, same seed | 95% interval of that |", "| --- |" + " --- |" * 4]
    for row in data["verdicts"]:
        cells = [row["status"], f"{row['final_loss']:.4f}", f"{row['paired_gap']:+.2%}"]
        cells.append("{low:+.2%} to {high:+.2%}".format(**row["interval"]))
        if row is data["verdicts"][0]:
            cells = ["the baseline", cells[1], "", ""]
        lines.append(f"| `{row['recipe']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and with --keep write."""
    kept = keeps(__doc__)
    rows = [{"sizes": sizes, "ratios": ratios(*sizes)} for sizes in SIZES]
    data = {"machine": environment(), "rounds": ROUNDS, "rows": rows}
    print(table(data))
    if kept:
        keep("experts", data)
        PAGE.write_text(TABLE.sub(lambda _: table(data), PAGE.read_text()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
