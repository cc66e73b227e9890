"""Switch Transformers (Fedus, Zoph and Shazeer 2021, arXiv 2101.03961): one expert a token, and a router in float32.

Trains a byte model on Python, C++ headers, Markdown and font metrics: eight experts in one of two blocks, each token in the
likeliest; the inverse square root schedule, so that every point of a curve is a run of that length. Compared: the router in
float32, in bfloat16 as the rest, and selectively (cast inside, bfloat16 outside); initial weights of a tenth of the usual
variance; capacities, over which tokens are dropped; a dense model of the same computation a token, at equal steps and in CPU
time to equal loss; and dropout of experts in fine-tuning on little text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from study import Kept, difference, domains, held_out, options, said, table, text, windows
from torch import Tensor, nn

import halfstep
from halfstep.lab.data import VOCABULARY, Corpus, load_corpus
from halfstep.lab.models.moe import MoE, Router, within


CONTEXT, EXPERTS, RATE, WARMUP = 64, 8, 3e-3, 30
SELECTIVE = replace(halfstep.get_recipe("bf16-mixed"), name="bf16-selective", float32_modules=("*.router",))
ARMS: Mapping[str, tuple[Any, dict[str, Any]]] = {  # a recipe, and options of the model
    "fp32": ("fp32", {}),
    "bf16": ("bf16-mixed", {}),
    "bf16, float32 router": (SELECTIVE, {}),
    "fp32, usual variance": ("fp32", {"scale": 1.0}),
    "bf16, usual variance": ("bf16-mixed", {"scale": 1.0}),
    "fp32, capacity 1": ("fp32", {"capacity": 1.0}),
    "fp32, capacity 1.25": ("fp32", {"capacity": 1.25}),
    "fp32, capacity 2": ("fp32", {"capacity": 2.0}),
    "dense": ("fp32", {"experts": 1}),
}
LONGER = 3
"""How many times as many steps the dense model has, to reach the mixture's loss."""
TUNED = {"none": (0.0, 0.0), "0.1": (0.1, 0.1), "0.1, experts 0.4": (0.1, 0.4)}


def steps_of(model: Any, recipe: Any, rate: float, steps: int, draw: Any, at: int, text: Tensor) -> dict[str, Any]:
    """Train: held-out losses every `at` steps, the share of tokens dropped in the last, and CPU seconds of the steps."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
    curve, seconds, dropped = [], 0.0, 0.0
    for step in range(1, steps + 1):
        batch, started = draw(), time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / WARMUP, (WARMUP / step) ** 0.5)
        output = model.train()(batch[:, :-1])
        loss = F.cross_entropy(output.logits.flatten(0, 1), batch[:, 1:].flatten()) + output.balance_loss
        loss.backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seconds += (time.process_time() - started) * (step > steps // 10)  # the first ones compile kernels
        if step % at == 0:
            curve.append(round(evaluated(model, text), 5))
    if output.routing and (capacity := model.blocks[1].mlp.capacity):
        chosen = output.routing[0].chosen
        kept = within(chosen, EXPERTS, int(chosen.numel() * capacity / EXPERTS))
        dropped = float((kept == EXPERTS).double().mean())
    halfstep.revert(model)
    return {"loss": curve[-1], "dropped": dropped, "seconds a step": seconds / (steps - steps // 10), "curve": curve}


@torch.no_grad()
def evaluated(model: nn.Module, text: Tensor) -> float:
    """Loss of held-out windows in nats a byte."""
    losses = [
        float(F.cross_entropy(model.eval()(part[:, :-1]).logits.flatten(0, 1), part[:, 1:].flatten()))
        for part in text.split(32)
    ]
    return fmean(losses)


def model_of(seed: int, **options: Any) -> MoE:
    """A model of two blocks with the seed's weights."""
    torch.manual_seed(seed)
    return MoE(VOCABULARY, CONTEXT, 2, 64, 4, **{"experts": EXPERTS, **options})


def study(arm: str, seed: int, steps: int, at: int, keep: Path | None = None) -> dict[str, Any]:
    """One arm's run; its weights are kept in a file, where one is given."""
    recipe, options = ARMS[arm]
    corpora, generator = domains(CONTEXT), torch.Generator().manual_seed(seed)
    text = torch.cat([held_out(corpus, 32, CONTEXT + 1) for corpus in corpora.values()])
    model = model_of(seed, **options)
    draw = partial(windows, corpora.values(), 4, CONTEXT + 1, generator)
    run = steps_of(model, recipe, RATE, steps * (LONGER if arm == "dense" else 1), draw, at, text)
    if keep:
        keep.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), keep)
    return run


def tuned(dropout: str, seed: int, steps: int, at: int, kept: Path) -> dict[str, Any]:
    """Fine-tune the mixture on 32 KB of reStructuredText; what counts is the least loss."""
    model = model_of(seed, dropout=TUNED[dropout][0], expert_dropout=TUNED[dropout][1])
    model.load_state_dict(torch.load(kept))
    corpus = small()
    draw = partial(windows, [corpus], 16, CONTEXT + 1, torch.Generator().manual_seed(seed))
    run = steps_of(model, "fp32", RATE / 3, steps, draw, at, held_out(corpus, 64, CONTEXT + 1))
    return {"loss": min(run["curve"]), **{key: run[key] for key in ("curve", "seconds a step")}}


def small() -> Corpus:
    """scikit-learn's descriptions of its data sets: the first 32 KB to train on, the rest held out."""
    corpus = load_corpus(f"{Path(torch.__file__).parents[1]}/sklearn/datasets/descr/*.rst", CONTEXT)
    whole = torch.cat([corpus.train, corpus.held_out])
    return replace(corpus, train=whole[: 1 << 15], held_out=whole[1 << 15 :])


@torch.no_grad()
def rounded_router() -> dict[str, float]:
    """What bfloat16 does to a router (768 to 32, of 8,192 random tokens): ties, other choices, sums of probabilities."""
    torch.manual_seed(0)
    router = Router(768, 32, 1)
    std = (0.1 / 768) ** 0.5
    nn.init.trunc_normal_(router.scores.weight, std=std, a=-2 * std, b=2 * std)
    x = torch.randn(8192, 768, dtype=torch.float32).bfloat16()
    wide, _, choice = router(x.float())
    narrow, _, other = router.bfloat16()(x)
    tied = narrow == narrow.amax(1, keepdim=True)
    return {
        "other choice": float((choice != other).double().mean()),
        "tied": float((tied.sum(1) > 1).double().mean()),
        "tied in float32": float(((wide == wide.amax(1, keepdim=True)).sum(1) > 1).double().mean()),
        "sum off by": float((narrow.double().sum(1) - 1).abs().max()),
    }


def speed(sparse: list[dict[str, Any]], dense: list[dict[str, Any]], at: int) -> dict[str, list[float]]:
    """By seed: the steps the dense model takes to the mixture's last loss over the mixture's own; the same of CPU time.

    Infinite where it does not get there in `LONGER` times the steps. The losses between two measurements are on a line.
    """
    steps, times = [], []
    for one, twin in zip(sparse, dense, strict=True):
        goal, curve, found = one["loss"], twin["curve"], float("inf")
        for i in range(1, len(curve)):
            if curve[i] <= goal < curve[i - 1]:
                found = at * (i + (curve[i - 1] - goal) / (curve[i - 1] - curve[i]))
                break
        steps.append(found / (at * len(one["curve"])))
        times.append(steps[-1] * twin["seconds a step"] / one["seconds a step"])
    return {"steps": steps, "time": times}


def main() -> None:
    """Train, measure, print and keep."""
    given = options(__doc__ or "", "runs/switch.json", seeds=3)
    torch.set_num_threads(1)
    steps, at, tuning = (4, 2, 2) if given.quick else (240, 20, 60)
    digests = {name: corpus.digest[:16] for name, corpus in domains(CONTEXT).items()}
    kept = Kept(given.out, steps=steps, at=at, tuning=tuning, rate=RATE, data=digests)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*ARMS, *TUNED)}
    for seed in range(given.seeds):
        weights = given.out.parent / f"switch-{seed}.pt"
        for arm in ARMS:
            make = partial(study, arm, seed, steps, at, weights if arm == "fp32" else None)
            found[arm].append(kept.run(f"{arm}, seed {seed}", make))
        for name in TUNED:
            make = partial(tuned, name, seed, tuning, max(1, tuning // 6), weights)
            found[name].append(kept.run(f"tuned with dropout {name}, seed {seed}", make))
    report(kept, found, at, given.seeds)
    picture(found, at, given.out.with_suffix(".png"))


def report(kept: Kept, found: dict[str, list[dict[str, Any]]], at: int, seeds: int) -> None:
    """Print the table and the comparisons, and keep them."""
    ends = {arm: [run["curve"][len(runs[0]["curve"]) // LONGER - 1 if arm == "dense" else -1] for run in runs]
            for arm, runs in found.items() if arm in ARMS} | {name: [run["loss"] for run in found[name]] for name in TUNED}
    print(f"\n{seeds} seeds, mean (95% interval); held-out loss in nats a byte:")
    cpu = {arm: [run["seconds a step"] for run in runs] for arm, runs in found.items()}
    rows = [(arm, text(ends[arm], ".4f"), f"{1000 * fmean(cpu[arm]):.0f} ms",
             f"{fmean(run.get('dropped', 0) for run in runs):.1%}") for arm, runs in found.items()]
    table(("", "loss", "CPU time a step", "dropped"), rows)
    pairs = [
        ("bf16, float32 router", "fp32"), ("bf16", "fp32"), ("bf16", "bf16, float32 router"),
        ("fp32", "fp32, usual variance"), ("bf16", "bf16, usual variance"), ("fp32, capacity 1", "fp32"),
        ("fp32, capacity 1.25", "fp32"), ("fp32, capacity 2", "fp32"), ("fp32", "dense"),
        ("0.1, experts 0.4", "none"), ("0.1, experts 0.4", "0.1"),
    ]  # fmt: skip
    against = {}
    for ours, other in pairs:
        each = difference(ends[ours], ends[other])
        against[f"{ours} / {other}"] = asdict(each)
        print(f"{ours}, against {other}: {each.low:+.4f} to {each.high:+.4f} ({said(each, 'better', 'worse')})")
    ratios = speed(found["fp32"], found["dense"], at)
    for name, values in ratios.items():
        print(f"{name} that the dense model needs for the mixture's loss, over the mixture's: {text(values)}")
    router = rounded_router()
    print(f"a router of 768 to 32 in bfloat16: {router}")
    kept.write(ends=ends, against=against, speed=ratios, router=router)


def picture(found: dict[str, list[dict[str, Any]]], at: int, path: Path) -> None:
    """Loss against CPU time of the mixture and the dense model; last losses of all arms."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for arm, colour in (("fp32", "C0"), ("dense", "C1")):
        for run in found[arm]:
            times = [(i + 1) * at * run["seconds a step"] for i in range(len(run["curve"]))]
            left.plot(times[2:], run["curve"][2:], colour, label=None if run is not found[arm][0] else arm)
    left.set(xlabel="CPU seconds of training", ylabel="held-out loss, nats a byte")
    left.legend()
    names = [arm for arm in ARMS if arm != "dense"]
    for i, arm in enumerate(names):
        right.plot([run["loss"] for run in found[arm]], [i] * len(found[arm]), "o", color=f"C{i}")
    right.set(yticks=range(len(names)), yticklabels=names, xlabel="held-out loss, every seed")
    right.invert_yaxis()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
