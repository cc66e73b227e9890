"""Rotary positions in bf16, and AnchorAttention for packed documents (Wang et al. 2024, arXiv 2411.13476).

Rotated queries and keys that are rounded to bf16 before their product no longer depend on relative positions alone. The
paper measures this by column of the attention weights, and trains on packed documents that attend to themselves and to
one shared first token, the anchor. This script trains a small reader (each token is a key and a value; the answer is
the value that its key had last in the document, or "none") on packed documents under full attention, attention within
documents (with continuous or reset positions), and an anchor, in fp32 and bf16-mixed. It tests the reader on unpacked
windows by distance, shifts trained and untrained models by 16 positions, and times attention.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from reader import KEYS, VALUES, Reader
from study import Kept, difference, options, signed, table, text, update
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import halfstep


WINDOW, SHIFT = 128, 16
SIZES = 300, 128, (32, 64, 128, 256, 512), (512, 2048, 8192)
"""Training steps, test windows, lengths that are shifted, lengths that are timed."""
WAYS = ("full", "documents", "reset", "anchor")
FORMATS = ("bfloat16", "float16", "float32", "float64")
NARROW = {"fp32": torch.float32, "bf16-mixed": torch.bfloat16}
DISTANCES = {"1 to 7": (1, 8), "8 to 31": (8, 32), "far": (32, WINDOW + 1), "new key": (0, 1)}


def windows(batch: int, length: int, seed: Any, documents: int = 1, shared: bool = True) -> tuple[Tensor, ...]:
    """Tokens, the numbers of their documents, answers, and the distance to the key's last occurrence (0: none). The
    windows' first token is shared (document 0), or each document begins with one. Keys have weights 1, 1/2, 1/3 ..."""
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    keys = torch.multinomial(1 / torch.arange(1.0, KEYS + 1), batch * length, True, generator=generator)
    values = torch.randint(VALUES, (batch * length,), generator=generator)
    first = torch.tensor([KEYS, VALUES])
    tokens = torch.cat([first.expand(batch, 1, 2), torch.stack([keys, values], -1).view(batch, length, 2)], 1)
    starts = torch.zeros(batch, length + 1, dtype=torch.int64)
    starts.scatter_(1, torch.randint(2, length + 1, (batch, documents - 1), generator=generator), 1)
    if shared:
        starts[:, 1] = 1
    else:
        tokens[starts > 0] = first
    doc, at = starts.cumsum(1), torch.arange(length + 1)
    same = (tokens[:, :, None, 0] == tokens[:, None, :, 0]) & (doc[:, :, None] == doc[:, None])
    last = torch.where(same & (at[:, None] > at), at, -1).amax(2)
    answers = torch.where(last < 0, VALUES, tokens[..., 1].gather(1, last.clamp(min=0)))
    return tokens, doc, answers, torch.where(last < 0, 0, at - last)


def layout(doc: Tensor, way: str) -> tuple[Tensor, Tensor]:
    """Position ids (batch, length), and the mask of the keys that each query sees (batch, 1, length, length)."""
    at = torch.arange(doc.shape[1])
    same, causal = doc[:, :, None] == doc[:, None], at[:, None] >= at
    positions = at.expand_as(doc)
    if way == "reset":
        positions = positions - torch.where(same, at, len(at)).amin(2)
    sees = {"full": same | True, "anchor": same | (doc[:, None] == 0)}.get(way, same)
    return positions, (sees & causal)[:, None]


def study(way: str, recipe: str, seed: int, steps: int, count: int, lengths: tuple[int, ...]) -> dict[str, float]:
    """Train a reader on windows of four documents: its accuracy in windows of one document, and a shift's effect."""
    torch.manual_seed(seed)
    model: Any = Reader()
    if way == "untrained":
        return shift_effects(model, lengths)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.15)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens, doc, answers, _ = windows(8, WINDOW, generator, 4, shared=way == "anchor")
        logits = model(tokens, *layout(doc, way), NARROW[recipe])
        update(scaler, optimizer, F.cross_entropy(logits.flatten(0, 1), answers.flatten()))
        schedule.step()
    tokens, doc, answers, far = windows(count, WINDOW, 10**6)
    with torch.no_grad():
        right = model(tokens, *layout(doc, "full"), NARROW[recipe]).argmax(-1) == answers
    found = {name: float(right[(far >= a) & (far < b)].double().mean()) for name, (a, b) in DISTANCES.items()}
    halfstep.revert(model)
    return found | shift_effects(model, lengths)


@torch.no_grad()
def shift_effects(model: Reader, lengths: tuple[int, ...]) -> dict[str, float]:
    """The effect of a shift by 16 positions in windows of one document; all but attention's operands is in float64.

    `sink`: the share of attention that the first token gets. `D`: the sum over columns of |the change of their weights|
    / the queries that see them (the paper's equation 4). `share`: the first column's share of `D` in bf16. `logits`:
    the mean change of the first column's logits, by length (equation 5).
    """
    model = model.double()

    @cache
    def ran(length: int, start: int, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
        (tokens, doc, *_), seen = windows(4, length, 7), []
        positions, mask = layout(doc, "full")
        model(tokens, positions + start, mask, narrow, seen)
        logits, weights = (torch.stack(each) for each in zip(*seen, strict=True))
        return logits[..., 0], weights

    def columns(start: int, narrow: torch.dtype) -> Tensor:
        change = ran(WINDOW, start, narrow)[1] - ran(WINDOW, SHIFT, narrow)[1]
        return (change.sum(-2).abs() / torch.arange(WINDOW + 1, 0, -1)).sum((0, 2)).mean(0)

    plain = columns(0, torch.bfloat16)
    found = {"sink": float(ran(WINDOW, 0, torch.float64)[1][..., 0].mean()), "share": float(plain[0] / plain.sum())}
    found |= {f"D, {name}": float(columns(0, getattr(torch, name)).sum()) for name in FORMATS}
    found |= {f"D, bfloat16, from {start}": float(columns(start, torch.bfloat16).sum()) for start in (SHIFT, 17, 2000)}
    for n in lengths:
        change = ran(n, 0, torch.bfloat16)[0] - ran(n, SHIFT, torch.bfloat16)[0]
        found[f"logits, {n}"] = float(change.abs().mean(-1).sum((0, 2)).mean())
    return found


@torch.no_grad()
def anchor_differences(model: Reader, seed: int = 0) -> dict[str, float]:
    """In float64, the distance of packed documents under the anchor's mask by FlexAttention from the same mask as a
    tensor, from each document alone after a first token at position 0, and from attention without the anchor."""
    model, wide = model.double(), torch.float64
    tokens, doc, *_ = windows(2, WINDOW, seed, 4)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((doc[batch, query] == doc[batch, key]) | (doc[batch, key] == 0)) & (query >= key)

    positions, mask = layout(doc, "anchor")
    with warnings.catch_warnings(action="ignore"):  # it is not compiled, so it computes all weights
        flex = model(tokens, positions, create_block_mask(sees, 2, None, *doc.shape[1:] * 2, device="cpu"), wide)
    alone = torch.zeros_like(flex)
    for row, number in [(row, int(n)) for row, each in enumerate(doc) for n in each.unique()]:
        chosen = (doc[row] == number) | (doc[row] == 0)
        at = positions[row][chosen]
        out = model(tokens[row][chosen][None], at[None], (at[:, None] >= at)[None, None], wide)
        alone[row, doc[row] == number] = out[0, doc[row][chosen] == number]
    lacking, others = model(tokens, *layout(doc, "documents"), wide), model(tokens, positions, mask, wide)
    found = {"mask": others, "documents by themselves": alone, "no anchor": lacking}
    return {name: float((flex - other).abs().max()) for name, other in found.items()}


def time_ratio(length: int, documents: int, rounds: int) -> float:
    """CPU time of attention, forward and backward, of equal documents each after the anchor, relative to full
    attention: the median of interleaved ratios; one head of 64, float32."""
    q, k, v = (torch.randn(1, 1, length + 1, 64, requires_grad=True) for _ in range(3))
    attend, ratios = partial(F.scaled_dot_product_attention, is_causal=True), []
    for _ in range(rounds):
        times = []
        for anchored in (True, False):
            start, parts = time.process_time(), [q, k, v]
            if anchored:
                own = [t[:, :, 1:].reshape(1, documents, -1, 64) for t in parts]
                firsts = [t[:, :, :1].expand(1, documents, 1, 64) for t in parts]
                parts = [torch.cat(pair, 2) for pair in zip(firsts, own, strict=True)]
            attend(*parts).sum().backward()
            times.append(time.process_time() - start)
        ratios.append(times[0] / times[1])
    return median(ratios)


def main() -> None:
    """Train, measure, print and save."""
    given = options(__doc__ or "", "runs/anchor.json", seeds=4)
    torch.set_num_threads(1)
    steps, count, lengths, spans = (1, 2, (16, 32), (512,)) if given.quick else SIZES
    kept = Kept(given.out, steps=steps, count=count, window=WINDOW, lengths=lengths)
    kinds = [(way, recipe) for recipe in NARROW for way in WAYS]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {kind: [] for kind in [*kinds, ("untrained", "none")]}
    for seed in range(given.seeds):
        for (way, recipe), runs in found.items():
            make = partial(study, way, recipe, seed, steps, count, lengths)
            runs.append(kept.run(f"{way}, {recipe}, seed {seed}", make))
    torch.manual_seed(0)
    same = kept.run("anchor by FlexAttention, float64", lambda: anchor_differences(Reader()))
    times = kept.run("time / full attention's", lambda: {str(n): time_ratio(n, 8, 15) for n in spans})
    print(f"\nlargest difference of the anchor by FlexAttention from: {same}")
    print(f"CPU time of attention over 8 documents against full attention's, by length: {times}")
    values = {kind: {name: [run[name] for run in runs] for name in runs[0]} for kind, runs in found.items()}
    far = {kind: values[kind]["far"] for kind in kinds}
    gains = {f"far, anchor - {way}, {r}": difference(far["anchor", r], far[way, r]) for r in NARROW for way in WAYS[:3]}
    gains |= {f"far, bf16-mixed - fp32, {w}": difference(far[w, "bf16-mixed"], far[w, "fp32"]) for w in WAYS}
    for kind, each in values.items():
        pairs = zip(each[f"logits, {lengths[-1]}"], each[f"logits, {lengths[0]}"], strict=True)
        each["growth"] = [longest / shortest for longest, shortest in pairs]
        gains[f"growth - 1, {', '.join(kind)}"] = difference(each["growth"], [1.0] * given.seeds)
        at_first = values["untrained", "none"]["share"]
        gains[f"share - untrained's, {', '.join(kind)}"] = difference(each["share"], at_first)
    print(f"\nright answers in windows of one document by distance, {given.seeds} seeds, mean (95% interval):")
    table(("attention", "recipe", *DISTANCES), [(*k, *(text(values[k][c]) for c in DISTANCES)) for k in kinds])
    print(f"\nmoved by {SHIFT} positions (growth: of the first column's logits, {lengths[0]} to {lengths[-1]} tokens):")
    columns = ("sink", "share", "growth", *(f"D, {name}" for name in FORMATS[:3]))
    table(("attention", "recipe", *columns), [(*k, *(text(each[c]) for c in columns)) for k, each in values.items()])
    for name, gain in gains.items():
        print(f"  {name}: {gain.low:+.3f} to {gain.high:+.3f}: {signed(gain, 'less', 'more')}")
    kept.write(gains={name: asdict(gain) for name, gain in gains.items()})
    picture(values, lengths, given.out.with_suffix(".png"))


def picture(values: dict[tuple[str, str], dict[str, list[float]]], lengths: tuple[int, ...], path: Path) -> None:
    """Accuracy by distance, and the change of the first column's logits by length, under bf16-mixed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    names = list(DISTANCES)[:3]
    for way in WAYS:
        left.plot(names, [fmean(values[way, "bf16-mixed"][name]) for name in names], "o-", label=way)
    left.set(title="Right answers by distance, bf16-mixed", ylim=(0, 1.02))
    for color, way in (("C3", "anchor"), ("C0", "full"), ("C7", "untrained")):
        recipe = "none" if way == "untrained" else "bf16-mixed"
        means = [fmean(values[way, recipe][f"logits, {n}"]) for n in lengths]
        right.semilogy(list(map(str, lengths)), means, "o-", color=color, label=way)
    right.set(title="Mean change of the first column's logits", xlabel="tokens")
    left.legend(), right.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
