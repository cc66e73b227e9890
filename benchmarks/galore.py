"""GaLore against full rank, and LoRA and ReLoRA of the same rank: pre-training on text, fine-tuning a classifier.

    python benchmarks/galore.py [--keep] [--out FOLDER]

Every method's learning rate is the best of a sweep with a separate seed; it then runs three seeds. --keep writes
results/galore.json. Every run writes its result to FOLDER and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.lab.environment import environment
from halfstep.lab.models.gpt import GPT
from halfstep.lab.task import VOCABULARY, Corpus, load_corpus
from halfstep.memory import measure
from halfstep.recipe import Projection, Recipe, get_recipe
from harness import keep


WIDTH, LAYERS, CONTEXT, BATCH, RANK = 64, 2, 64, 16, 16
STEPS, GAP, MERGE = 400, 50, 100
TUNED_RANK, TUNED_STEPS = 4, 200
SWEEP, SEEDS = 100, (0, 1, 2)
RATES = {
    "full": (1e-3, 3e-3, 1e-2),
    "galore": (3e-3, 1e-2, 3e-2, 1e-1),
    "galore-8bit": (),  # the rate of GaLore
    "lora": (1e-3, 3e-3, 1e-2),
    "relora": (1e-3, 3e-3, 1e-2),
}
TUNED_RATES = {"full": (1e-4, 3e-4, 1e-3, 3e-3), "galore": (1e-3, 3e-3, 1e-2, 3e-2), "lora": (1e-3, 3e-3, 1e-2)}
PACKAGES = ("asyncio", "email", "unittest", "xml", "multiprocessing", "importlib", "concurrent", "ctypes")


# ---- LoRA, and ReLoRA, which merges and begins anew -----------------------------------------------------------------


class LoRA(nn.Module):
    """y = x W^T + b + 2 (x A^T) B^T, with W frozen and B initialised to zero (Hu et al. 2021, arXiv 2106.09685)."""

    def __init__(self, stock: nn.Linear, rank: int) -> None:
        super().__init__()
        self.stock = stock
        self.stock.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, stock.in_features))
        self.b = nn.Parameter(torch.zeros(stock.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.stock(x) + 2 * F.linear(F.linear(x, self.a), self.b)  # type: ignore[no-any-return]

    @torch.no_grad()
    def merge(self) -> None:
        """Add 2 B A to the weight and reinitialise A and B (Lialin et al. 2023, arXiv 2307.05695)."""
        self.stock.weight += 2 * self.b @ self.a
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.b.zero_()


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and name != "head" and not isinstance(module, LoRA):
                setattr(module, name, LoRA(child, rank))
    return model


def merged(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for module in model.modules():
        if isinstance(module, LoRA):
            module.merge()
            for parameter in (module.a, module.b):
                for state in optimizer.state[parameter].values():
                    state.zero_()


# ---- one run --------------------------------------------------------------------------------------------------------


def recipe_of(method: str, rank: int) -> Recipe:
    """The method's recipe with float32 matmuls, so that only optimizers are compared."""
    if not method.startswith("galore"):
        return get_recipe("fp32")
    return replace(get_recipe(method), name=f"{method}-fp32", compute="fp32", projection=Projection(rank, GAP))


def trained(
    method: str, model: nn.Module, rank: int, lr: float, steps: int, loss_of: Callable[[nn.Module, int], Tensor]
) -> dict[str, Any]:
    """Train with 10% of warm-up and a cosine decay to 10% of the learning rate. Returns the bytes per parameter of
    weights and optimizer states together, and of the states."""
    count = sum(p.numel() for p in model.parameters())
    if method in ("lora", "relora"):
        model = with_lora(model, rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    model, low_bit, scaler = halfstep.prepare(model, optimizer, recipe_of(method, rank))
    for step in range(steps):
        since = step % MERGE if method == "relora" and step >= MERGE else MERGE
        rate = min(1.0, (step + 1) / (0.1 * steps)) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        if method == "relora" and step and step % MERGE == 0:
            merged(model, low_bit)
        for group in low_bit.param_groups:
            group["lr"] = lr * rate * min(1.0, (since + 1) / 20)  # ReLoRA warms up again after each merge
        loss = loss_of(model, step)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.clip_grad_norm_(low_bit, 1.0)
        scaler.step(low_bit)
        scaler.update()
        low_bit.zero_grad()
    size = measure(model, low_bit)
    active = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"bytes": (weights + size.states * active) / count, "states": size.states * active / count}


def pretrained(method: str, lr: float, seed: int, corpus: Corpus, save: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = GPT(VOCABULARY, CONTEXT, LAYERS, WIDTH, heads=2)
    generator = torch.Generator().manual_seed(seed)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        starts = torch.randint(len(corpus.train) - CONTEXT - 1, (BATCH,), generator=generator)
        return next_byte(model, corpus.windows("train", starts, CONTEXT + 1))

    found = trained(method, model, RANK, lr, STEPS, loss_of)
    if save is not None:
        torch.save(model.state_dict(), save)
    with torch.no_grad():
        starts = torch.linspace(0, len(corpus.held_out) - CONTEXT - 2, 512).long().split(64)
        held_out = [float(next_byte(model, corpus.windows("held_out", part, CONTEXT + 1))) for part in starts]
    return {"loss": statistics.fmean(held_out), **found}


def next_byte(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class Classifier(nn.Module):
    """A pre-trained GPT's hidden states, averaged over tokens, with a new linear head."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.body = GPT(VOCABULARY, CONTEXT, LAYERS, WIDTH, heads=2)
        self.body.load_state_dict(weights)
        self.body.head = nn.Identity()
        self.head = nn.Linear(WIDTH, len(PACKAGES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))  # type: ignore[no-any-return]


def pieces() -> dict[bool, tuple[Tensor, Tensor]]:
    """Pieces of 64 bytes of Python's own packages with the package as label, by whether they are held out (every fifth
    file)."""
    found: dict[bool, list[tuple[bytes, int]]] = {False: [], True: []}
    for label, package in enumerate(PACKAGES):
        files = sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py"))
        for number, file in enumerate(files):
            text = b" ".join(file.read_bytes().split())
            cut = [text[i : i + CONTEXT] for i in range(0, len(text) - CONTEXT, CONTEXT)]
            found[number % 5 == 4] += [(piece, label) for piece in cut]
    return {
        held: (torch.tensor([list(piece) for piece, _ in both]), torch.tensor([label for _, label in both]))
        for held, both in found.items()
    }


def tuned(
    method: str, lr: float, seed: int, weights: dict[str, Tensor], data: dict[bool, tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, (x, y) = Classifier(weights), data[False]
    generator = torch.Generator().manual_seed(seed)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        rows = torch.randint(len(x), (2 * BATCH,), generator=generator)
        return F.cross_entropy(model(x[rows]), y[rows], weight=balance)

    balance = len(y) / (len(PACKAGES) * torch.bincount(y, minlength=len(PACKAGES)).float())
    found = trained(method, model, TUNED_RANK, lr, TUNED_STEPS, loss_of)
    with torch.no_grad():
        hits = torch.cat([model(part).argmax(1) for part in data[True][0].split(512)]) == data[True][1]
    shares = [float(hits[data[True][1] == label].float().mean()) for label in range(len(PACKAGES))]
    return {"loss": -statistics.fmean(shares), "accuracy": statistics.fmean(shares), **found}


# ---- all of them ----------------------------------------------------------------------------------------------------


def best(rates: dict[str, tuple[float, ...]], run: Callable[[str, float, int], dict[str, Any]]) -> dict[str, Any]:
    """For each method: its learning rate by the sweep, and the results of the seeds with it."""
    found: dict[str, Any] = {}
    for method, tried in rates.items():
        sweep = {f"{lr:g}": run(method, lr, SWEEP)["loss"] for lr in tried}
        lr = min(tried, key=lambda lr: sweep[f"{lr:g}"]) if tried else found["galore"]["lr"]
        runs = [run(method, lr, seed) for seed in SEEDS]
        found[method] = {"lr": lr, "sweep": sweep, "runs": runs, "mean": statistics.fmean(r["loss"] for r in runs)}
    return found


def kept(out: Path, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The stored result of a run; if there is none, run and store it."""
    file = out / f"{name}.json"
    if not file.exists():
        found = run()
        print(name, json.dumps(found), flush=True)
        file.write_text(json.dumps(found))
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/galore"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    corpus, base = load_corpus(None, CONTEXT), options.out / "base.pt"
    before = best(
        RATES,
        lambda m, lr, s: kept(options.out, f"pre-{m}-{lr:g}-{s}", lambda: pretrained(m, lr, s, corpus)),
    )
    if not base.exists():
        pretrained("full", before["full"]["lr"], SWEEP, corpus, base)
    weights, data = torch.load(base), pieces()
    after = best(
        TUNED_RATES,
        lambda m, lr, s: kept(options.out, f"tuned-{m}-{lr:g}-{s}", lambda: tuned(m, lr, s, weights, data)),
    )
    figures = {
        "environment": environment(),
        "pretraining": {"rank": RANK, "gap": GAP, "steps": STEPS, "width": WIDTH, **before},
        "tuning": {
            "rank": TUNED_RANK,
            "steps": TUNED_STEPS,
            "pieces": [len(data[False][1]), len(data[True][1])],
            **after,
        },
        "summary": summary(before, after),
    }
    print(json.dumps(figures["summary"], indent=2))
    if options.keep:
        keep("galore", figures)


def summary(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The mean losses, their gaps to full rank with the same seed, and the accuracies, by method."""
    found: dict[str, Any] = {}
    for method, what in before.items():
        pairs = list(zip(what["runs"], before["full"]["runs"], strict=True))
        gaps = [run["loss"] / full["loss"] - 1 for run, full in pairs]
        found[method] = {
            "loss": what["mean"],
            "gap": statistics.fmean(gaps), "least": min(gaps), "most": max(gaps),
            "states": what["runs"][0]["states"], "bytes": what["runs"][0]["bytes"],
        }  # fmt: skip
    for method, what in after.items():
        accuracies = [run["accuracy"] for run in what["runs"]]
        found.setdefault(method, {})["accuracy"] = statistics.fmean(accuracies)
        found[method] |= {"accuracy_least": min(accuracies), "accuracy_most": max(accuracies)}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
