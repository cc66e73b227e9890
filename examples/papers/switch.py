"""Switch Transformers (Fedus, Zoph and Shazeer 2021, arXiv 2101.03961): one expert per token, and a router in float32.

Trains a byte model on Python, C++ headers, Markdown and font metrics: eight experts in one of two blocks, each token
processed by the likeliest; with the inverse square root schedule, under which every point of a curve is a run of that
length. Compared: the router in float32, in bfloat16 like the rest, and selectively (float32 inside, bfloat16 outside);
initial weights of a tenth of the usual variance; capacities, beyond which tokens are dropped; a dense model with the
same computation per token, at equal steps and by CPU time to equal loss; and dropout of experts in fine-tuning on
little text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from study import Kept, difference, domains, held_out, options, paired, signed, table, text, update, windows
from torch import Tensor, nn

import halfstep
from halfstep.lab.models.moe import MoE, Output, within
from halfstep.lab.task import VOCABULARY, Corpus, load_corpus


CONTEXT, EXPERTS, RATE, WARMUP = 64, 8, 3e-3, 30
SELECTIVE = replace(halfstep.get_recipe("bf16-mixed"), name="bf16-selective", float32_modules=("*.router",))
ARMS: Mapping[str, tuple[Any, int, dict[str, Any]]] = {  # recipe, factor of the steps, options of the model
    "fp32": ("fp32", 2, {}),
    "dense": ("fp32", 2, {"experts": 1}),
    "fp32, usual variance": ("fp32", 2, {"scale": 1.0}),
    "dense, usual variance": ("fp32", 2, {"experts": 1, "scale": 1.0}),
    "bf16": ("bf16-mixed", 1, {}),
    "bf16, float32 router": (SELECTIVE, 1, {}),
    "fp32, capacity 1": ("fp32", 1, {"capacity": 1.0}),
    "fp32, capacity 1.25": ("fp32", 1, {"capacity": 1.25}),
}
TWINS = {"a tenth": ("fp32", "dense"), "usual": ("fp32, usual variance", "dense, usual variance")}
PAIRS = (
    ("bf16, float32 router", "fp32"),
    ("bf16", "fp32"),
    ("bf16", "bf16, float32 router"),
    ("fp32", "fp32, usual variance"),
    ("fp32, capacity 1", "fp32"),
    ("fp32, capacity 1.25", "fp32"),
    ("0.1, experts 0.4", "none"),
    ("0.1, experts 0.4", "0.1"),
)
TIMED = ("fp32", "dense", "bf16", "bf16, float32 router")
TUNED = {"none": (0.0, 0.0), "0.1": (0.1, 0.1), "0.1, experts 0.4": (0.1, 0.4)}


def prepared(model: MoE, recipe: Any, rate: float) -> tuple[Any, Any, Any]:
    """The model under a recipe, with AdamW and its scaler."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    return halfstep.prepare(model, optimizer, recipe)


def step_of(model: Any, optimizer: Any, scaler: Any, batch: Tensor) -> Output:
    """One step; returns the model's output."""
    output: Output = model.train()(batch[:, :-1])
    loss = F.cross_entropy(output.logits.flatten(0, 1), batch[:, 1:].flatten()) + output.balance_loss
    update(scaler, optimizer, loss)
    return output


def trained(model: Any, recipe: Any, rate: float, steps: int, draw: Any, at: int, text: Tensor) -> dict[str, Any]:
    """Train: held-out losses every `at` steps, and the share of tokens dropped in the last step."""
    model, optimizer, scaler = prepared(model, recipe, rate)
    curve, dropped = [], 0.0
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / WARMUP, (WARMUP / step) ** 0.5)
        output = step_of(model, optimizer, scaler, draw())
        if step % at == 0:
            curve.append(round(evaluated(model, text), 5))
    if output.routing and (capacity := model.blocks[1].mlp.capacity):
        chosen = output.routing[0].chosen
        kept = within(chosen, EXPERTS, int(chosen.numel() * capacity / EXPERTS))
        dropped = float((kept == EXPERTS).double().mean())
    halfstep.revert(model)
    return {"loss": curve[-1], "dropped": dropped, "curve": curve}


def step_seconds(rounds: int) -> dict[str, list[float]]:
    """CPU seconds of a step of four arms, interleaved."""
    generator, corpora = torch.Generator().manual_seed(0), domains(CONTEXT).values()
    arms = {arm: prepared(model_of(0, **ARMS[arm][2]), ARMS[arm][0], RATE) for arm in TIMED}
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        batch = windows(corpora, 4, CONTEXT + 1, generator)
        for arm, parts in arms.items():
            started = time.process_time()
            step_of(*parts, batch)
            found[arm].append(round(time.process_time() - started, 5))
    return {arm: seconds[rounds // 4 :] for arm, seconds in found.items()}  # the first ones compile kernels


@torch.no_grad()
def evaluated(model: nn.Module, text: Tensor) -> float:
    """Loss on held-out windows in nats per byte."""
    model.eval()
    parts = [(model(part[:, :-1]).logits.flatten(0, 1), part[:, 1:].flatten()) for part in text.split(32)]
    return fmean(float(F.cross_entropy(*part)) for part in parts)


def model_of(seed: int, **options: Any) -> MoE:
    """A model of two blocks, initialized with the seed."""
    torch.manual_seed(seed)
    return MoE(VOCABULARY, CONTEXT, 2, 64, 4, **{"experts": EXPERTS, **options})


def study(arm: str, seed: int, steps: int, at: int, count: int = 32, keep: Path | None = None) -> dict[str, Any]:
    """One arm's run; its weights are saved if a file is given."""
    recipe, times, options = ARMS[arm]
    corpora, generator = domains(CONTEXT), torch.Generator().manual_seed(seed)
    text = torch.cat([held_out(corpus, count, CONTEXT + 1) for corpus in corpora.values()])
    model = model_of(seed, **options)
    draw = partial(windows, corpora.values(), 4, CONTEXT + 1, generator)
    run = trained(model, recipe, RATE, steps * times, draw, at, text)
    if keep:
        keep.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), keep)
    return run


def tuned(dropout: str, seed: int, steps: int, at: int, kept: Path) -> dict[str, Any]:
    """Fine-tune the mixture on 32 KB of reStructuredText; the result is the smallest loss."""
    if not kept.exists():
        raise SystemExit(f"{kept}, the weights to fine-tune, is not there: give another --out, or remove the JSON file")
    model = model_of(seed, dropout=TUNED[dropout][0], expert_dropout=TUNED[dropout][1])
    model.load_state_dict(torch.load(kept))
    corpus = small()
    draw = partial(windows, [corpus], 16, CONTEXT + 1, torch.Generator().manual_seed(seed))
    run = trained(model, "fp32", RATE / 3, steps, draw, at, held_out(corpus, 64, CONTEXT + 1))
    return {"loss": min(run["curve"]), "curve": run["curve"]}


def small() -> Corpus:
    """scikit-learn's descriptions of its data sets: the first 32 KB for training, the rest held out."""
    corpus = load_corpus(f"{Path(torch.__file__).parents[1]}/sklearn/datasets/descr/*.rst", CONTEXT)
    whole = torch.cat([corpus.train, corpus.held_out])
    return replace(corpus, train=whole[: 1 << 15], held_out=whole[1 << 15 :])


def steps_ratio(sparse: list[dict[str, Any]], dense: list[dict[str, Any]]) -> list[float]:
    """By seed, the steps of the mixture relative to the dense model's to the higher of their final losses.

    Losses are interpolated linearly between measurements.
    """
    ratios = []
    for pair in zip(sparse, dense, strict=True):
        goal, steps = max(run["loss"] for run in pair), []
        for run in pair:
            curve = run["curve"]
            i = next(i for i, loss in enumerate(curve) if loss <= goal)
            steps.append(i + ((curve[i - 1] - goal) / (curve[i - 1] - curve[i]) if i else 1.0))
        ratios.append(steps[0] / steps[1])
    return ratios


def main() -> None:
    """Train, measure, print and save."""
    given = options(__doc__ or "", "runs/switch.json", seeds=3)
    torch.set_num_threads(1)
    steps, at, tuning, count, rounds = (2, 1, 1, 1, 1) if given.quick else (240, 40, 60, 32, 60)
    digests = {name: corpus.digest[:16] for name, corpus in domains(CONTEXT).items()}
    kept = Kept(given.out, steps=steps, at=at, tuning=tuning, held_out=count, rate=RATE, data=digests)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*ARMS, *TUNED)}
    for seed in range(given.seeds):
        weights = given.out.parent / f"switch-{seed}.pt"
        for arm in ARMS:
            make = partial(study, arm, seed, steps, at, count, weights if arm == "fp32" else None)
            found[arm].append(kept.run(f"{arm}, seed {seed}", make))
        for name in TUNED:
            make = partial(tuned, name, seed, tuning, max(1, tuning // 6), weights)
            found[name].append(kept.run(f"tuned with dropout {name}, seed {seed}", make))
    seconds = kept.run("CPU seconds of steps", partial(step_seconds, rounds))
    report(kept, found, seconds, given.seeds)
    picture(found, at, median(seconds["fp32"]) / median(seconds["dense"]), given.out.with_suffix(".png"))


def report(kept: Kept, found: dict[str, list[dict[str, Any]]], seconds: dict[str, list[float]], seeds: int) -> None:
    """Print the table and the comparisons, and save them."""
    ends = {}  # after the same number of steps for all, and after more where an arm has more
    for name, runs in found.items():
        times = ARMS[name][1] if name in ARMS else 1
        ends[name] = [run["curve"][len(run["curve"]) // times - 1] if name in ARMS else run["loss"] for run in runs]
        if times > 1:
            ends[f"{name}, to the end"] = [run["loss"] for run in runs]
    print(f"\n{seeds} seeds, mean (95% interval); held-out loss in nats a byte:")
    dropped = {name: f"{fmean(run.get('dropped', 0) for run in runs):.1%}" for name, runs in found.items()}
    rows = [(name, text(values, ".4f"), dropped.get(name, "")) for name, values in ends.items()]
    table(("", "loss", "dropped"), rows)
    twins = [(mixture + end, dense + end) for mixture, dense in TWINS.values() for end in ("", ", to the end")]
    against = {}
    for ours, other in (*PAIRS, *twins):
        each = difference(ends[ours], ends[other])
        against[f"{ours} / {other}"] = asdict(each)
        print(f"{ours}, against {other}: {each.low:+.4f} to {each.high:+.4f} ({signed(each, 'better', 'worse')})")
    medians = {arm: median(values) for arm, values in seconds.items()}
    print("CPU time of a step, median:", ", ".join(f"{arm} {1000 * value:.1f} ms" for arm, value in medians.items()))
    steps = {variance: steps_ratio(*(found[arm] for arm in pair)) for variance, pair in TWINS.items()}
    pairs = (("fp32", "dense"), ("bf16, float32 router", "bf16"))
    cost = {" / ".join(pair): medians[pair[0]] / medians[pair[1]] for pair in pairs}
    times = {
        variance: asdict(paired([cost["fp32 / dense"] * ratio for ratio in ratios]))
        for variance, ratios in steps.items()
    }
    for variance, ratios in steps.items():
        print(f"to equal loss, mixture over dense, weights of {variance} variance: {text(ratios)} of the steps,")
        print(f"  {text([cost['fp32 / dense'] * ratio for ratio in ratios])} of the CPU time")
    kept.write(ends=ends, against=against, steps=steps, medians=medians, cost=cost, times=times)


def picture(found: dict[str, list[dict[str, Any]]], at: int, cost: float, path: Path) -> None:
    """Loss against CPU time of mixtures and dense models, and losses of all arms after equal steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for style, (variance, pair) in zip("-:", TWINS.items(), strict=True):
        for arm, colour, kind in zip(pair, ("C0", "C1"), ("mixture", "dense"), strict=True):
            for i, run in enumerate(found[arm]):
                times = [(step + 1) * at * (cost if kind == "mixture" else 1) for step in range(len(run["curve"]))]
                name = None if i else f"{kind}, {variance} variance"
                left.plot(times[1:], run["curve"][1:], style, color=colour, label=name, linewidth=1)
    left.set(xlabel="CPU time of training, in steps of the dense model", ylabel="held-out loss, nats a byte")
    left.legend(fontsize="small")
    for i, (arm, (_, times, _)) in enumerate(ARMS.items()):
        losses = [run["curve"][len(run["curve"]) // times - 1] for run in found[arm]]
        right.plot(losses, [i] * len(losses), "o", color=f"C{i}")
    right.set(yticks=range(len(ARMS)), yticklabels=ARMS, xlabel="held-out loss after as many steps, every seed")
    right.invert_yaxis()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
