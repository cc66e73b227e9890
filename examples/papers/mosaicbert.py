"""What MosaicBERT (Portes et al. 2023, arXiv 2312.17482) changes in BERT, one change at a time: time and accuracy.

The lab's small BERT is trained under bf16-mixed to predict masked words of the Python standard library's source, in
blocks of up to 64 words. Six changes are tested one by one, and all together: ALiBi instead of learned positions, gated
MLPs, no computation on padding, layer norms in bf16, 30% of the words masked instead of 15%, and a vocabulary that is a
multiple of 64. Each is measured by the CPU time of a training step, interleaved with the others in one process, by the
loss on held-out text with 15% masked, and by three probes of the frozen features. The model with all changes is also
trained for as long as the unchanged model takes.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
from mosaic import CHANGES, CLS, CONTEXT, MASK, OTHER, PAD, WORDS, Mosaic
from sklearn.linear_model import LogisticRegression
from study import Kept, compared, options, table, text, update
from torch import Tensor

import halfstep
from halfstep.lab.task import load_corpus


BATCH = 16
ARMS: dict[str, tuple[str, ...]] = {"none": ()} | {name: (name,) for name in CHANGES} | {"all": CHANGES}
LONGER = "all, as long"
PROBES = ("order", "pair", "replaced")
MEASURES = ("time", "loss", "probes", *PROBES)


@cache
def blocks(part: str, size: int) -> Tensor:
    """Blocks of text between blank lines, as (blocks, context) words: a class token first, padding at the end."""
    corpus = load_corpus(None, CONTEXT)
    texts = [bytes(t.numpy()).decode("utf-8", "ignore") for t in (corpus.train[:size], corpus.held_out[: size // 4])]
    train, held = ([re.findall(r"\w+|[^\w\s]", block) for block in whole.split("\n\n")] for whole in texts)
    most = Counter(word for block in train for word in block).most_common(WORDS - 4)
    numbers = {word: number + 4 for number, (word, _) in enumerate(most)}
    long = [block for block in (train if part == "train" else held) if len(block) >= 8]
    found = torch.full((len(long), CONTEXT), PAD)
    for row, block in zip(found, long, strict=True):
        block = [CLS, *(numbers.get(word, OTHER) for word in block[: CONTEXT - 1])]
        row[: len(block)] = torch.tensor(block)
    return found


def masked(words: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The masked words, and the targets (-100 elsewhere): of chosen words, 80% are masked and 10% replaced."""
    chosen = (torch.rand(words.shape, generator=generator) < share) & (words > OTHER)
    kind = torch.rand(words.shape, generator=generator)
    other = torch.randint(4, WORDS, words.shape, generator=generator)
    shown = torch.where(kind < 0.8, MASK, torch.where(kind < 0.9, other, words))
    return torch.where(chosen, shown, words), torch.where(chosen, words, -100)


class Training:
    """A model in training: each call performs one step."""

    def __init__(self, arm: str, seed: int, steps: int, size: int) -> None:
        torch.manual_seed(seed)
        self.share = 0.3 if "30% masked" in ARMS[arm] else 0.15
        self.words, self.generator = blocks("train", size), torch.Generator().manual_seed(seed)
        model, warm = Mosaic(ARMS[arm]), max(1, round(0.06 * steps))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
        self.model, self.optimizer, self.scaler = halfstep.prepare(model, optimizer, "bf16-mixed")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warm, 1 - 0.98 * (step - warm) / max(1, steps - warm))
        )

    def __call__(self) -> None:
        """Draw a batch, mask it, and update."""
        words = self.words[torch.randint(len(self.words), (BATCH,), generator=self.generator)]
        update(self.scaler, self.optimizer, self.model(*masked(words, self.share, self.generator)))
        self.schedule.step()


def probe(name: str, size: int, count: int) -> tuple[Tensor, Tensor]:
    """Held-out blocks and their labels: whether the halves are swapped, whether the second half is another block's, or
    whether a tenth of the words was replaced."""
    generator = torch.Generator().manual_seed(PROBES.index(name))
    words = blocks("held out", size)
    words = words[torch.randperm(len(words), generator=generator)[:count]].clone()
    answers = torch.randint(0, 2, (len(words),), generator=generator)
    whole = [row[1 : int((row != PAD).sum())].clone() for row in words]
    halves = [(row[: len(row) // 2], row[len(row) // 2 :]) for row in whole]
    for i in answers.nonzero().flatten().tolist():
        first, second = halves[i]
        if name == "order":
            first, second = second, first
        elif name == "pair":
            second = halves[i - 1][1][: CONTEXT - 1 - len(first)]
        changed = torch.cat([first, second])
        if name == "replaced":
            places = torch.randperm(len(changed), generator=generator)[: max(1, len(changed) // 10)]
            changed[places] = torch.randint(4, WORDS, places.shape, generator=generator)
        words[i, 1:] = PAD
        words[i, 1 : 1 + len(changed)] = changed
    return words, answers


@torch.no_grad()
def mean_features(model: Mosaic, words: Tensor) -> Any:
    """The features of each sequence: the mean of the last block's output over its words."""
    found = []
    for some in words.split(100):
        x, places = model.features(some)
        spread = x.new_zeros(some.numel(), x.shape[1]).index_copy(0, places, x).unflatten(0, some.shape)
        real = (some != PAD)[..., None]
        found.append((spread * real).sum(1) / real.sum(1))
    return torch.cat(found).numpy()


def study(arm: str, seed: int, steps: int, size: int, count: int) -> dict[str, Any]:
    """One run: the held-out loss with 15% masked, and the accuracy of logistic regressions on frozen features."""
    train = Training(arm, seed, steps, size)
    for _ in range(steps):
        train()
    model = train.model.eval()
    generator, held = torch.Generator().manual_seed(0), blocks("held out", size)[:512]
    with torch.no_grad():
        losses = [float(model(*masked(words, 0.15, generator))) for words in held.split(BATCH)]
    run: dict[str, Any] = {"steps": steps, "loss": round(fmean(losses), 4)}
    halfstep.revert(model)
    for name in PROBES:
        words, answers = probe(name, size, count)
        x, half = mean_features(model, words), len(words) // 2
        x = (x - x[:half].mean(0)) / x[:half].std(0)
        regression = LogisticRegression(C=0.1, max_iter=300).fit(x[:half], answers[:half])
        run[name] = round(float(regression.score(x[half:], answers[half:])), 4)
    return run | {"probes": round(fmean(run[name] for name in PROBES), 4)}


def times(seed: int, size: int, rounds: int) -> dict[str, Any]:
    """CPU time of a training step of every arm relative to the unchanged model's: the median of interleaved rounds."""
    trainings, ratios = {arm: Training(arm, seed, 100, size) for arm in ARMS}, {arm: [] for arm in ARMS}
    warm = min(2, rounds)
    for number in range(warm + rounds):
        spent = {}
        for arm, train in trainings.items():
            start = time.process_time()
            train()
            spent[arm] = time.process_time() - start
        for arm in ARMS if number >= warm else ():
            ratios[arm].append(spent[arm] / spent["none"])
    return {arm: round(statistics.median(found), 4) for arm, found in ratios.items()}


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The Pareto front: the names of points that no other point dominates."""

    def beaten(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())

    return [name for name, point in points.items() if not beaten(*point)]


def main() -> None:
    """Time, train, print and save."""
    given = options(__doc__ or "", "runs/mosaicbert.json")
    torch.set_num_threads(1)
    steps, size, count, rounds = (1, 100_000, 40, 1) if given.quick else (300, 4_000_000, 1200, 16)
    kept = Kept(given.out, steps=steps, size=size, probes=count, rounds=rounds)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in (*ARMS, LONGER)}
    for seed in range(given.seeds):
        ratios = kept.run(f"times, seed {seed}", partial(times, seed, size, rounds))
        longer = max(1, round(steps / ratios["all"]))
        for arm, made in runs.items():
            one = partial(study, "all", seed, longer) if arm == LONGER else partial(study, arm, seed, steps)
            run = kept.run(f"{arm}, seed {seed}", partial(one, size, count))
            made.append(run | {"time": ratios[arm] if arm in ratios else ratios["all"] * longer / steps})
    found = {arm: {m: [run[m] for run in made] for m in MEASURES} for arm, made in runs.items()}
    print(f"\nmeans of {given.seeds} seeds (95% interval):")
    table(("changes", *MEASURES), [(arm, *(text(v, ".4g") for v in each.values())) for arm, each in found.items()])
    pairs = {f"{arm}, {m}": (found[arm][m], found["none"][m]) for arm in runs if arm != "none" for m in MEASURES[:3]}
    gains = compared("against the unchanged model", pairs, "less", "more")
    means = {arm: {m: fmean(values) for m, values in each.items()} for arm, each in found.items()}
    fronts = {
        "loss": front({arm: (means[arm]["time"], means[arm]["loss"]) for arm in ARMS}),
        "probes": front({arm: (means[arm]["time"], -means[arm]["probes"]) for arm in ARMS}),
    }
    for measure, members in fronts.items():
        print(f"Pareto front of time and {measure}, by means: {', '.join(members)}")
    kept.write(means=means, gains=gains, fronts=fronts)
    picture(found, fronts, given.out.with_suffix(".png"))


def picture(found: dict[str, dict[str, list[float]]], fronts: dict[str, list[str]], path: Path) -> None:
    """Time against loss and probes: every seed, the means, and the front."""
    figure, pair = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    titles = ("loss on held-out text, 15% masked", "accuracy of the probes, mean of three")
    for axes, title, (measure, members) in zip(pair, titles, fronts.items(), strict=True):
        for number, (arm, each) in enumerate(found.items()):
            axes.plot(each["time"], each[measure], ".", color=f"C{number}", alpha=0.5)
            axes.plot(fmean(each["time"]), fmean(each[measure]), "o", color=f"C{number}", label=arm)
        line = sorted((fmean(found[arm]["time"]), fmean(found[arm][measure])) for arm in members)
        axes.plot(*zip(*line, strict=True), "k-", linewidth=0.8, drawstyle="steps-post")
        axes.set(xlabel="CPU time of the training, unchanged = 1", title=title)
    pair[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
