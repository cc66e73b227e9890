"""Balancing a mixture of experts over the global batch (Qiu et al. 2025, arXiv 2501.11873).

A balance loss makes the loads of experts equal: within each micro-batch, which is often of one domain, or within the
global batch. This script trains a byte model with eight experts, two per token, on micro-batches of one domain each:
Python, C++ headers, Markdown and font metrics. The counts by which the loss weights probabilities are those of the
micro-batch, those accumulated in a buffer since the step began, or those of all micro-batches on two ranks (gloo). It
measures the held-out loss, the load, and the mutual information of expert and domain, in bits. Controls: no balance
loss, and micro-batches of mixed domains.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from study import Kept, difference, domains, held_out, options, signed, table, text, windows
from torch import Tensor

import halfstep
from halfstep.lab.models.moe import MoE, balance, counted
from halfstep.lab.task import VOCABULARY, Corpus


CONTEXT, EXPERTS, SLOTS, WEIGHT, RATE = 64, 8, 2, 0.02, 2e-3
RANKS = 2


def over_ranks(counts: Tensor) -> Tensor:
    """The counts of all micro-batches of all ranks, the same on each rank: (groups, experts)."""
    total = counts.sum(0)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.expand_as(counts)


WAYS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,  # with weight zero
    "micro-batch": lambda counts: counts,
    "micro-batch, mixed": lambda counts: counts,
    "buffered": lambda counts: counts.cumsum(0),
    "all ranks": over_ranks,
}


def trained(way: str, seed: int, steps: int, corpora: Mapping[str, Corpus]) -> MoE:
    """The trained model. A step takes four windows of each domain: one micro-batch each, divided among ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed)
    model: Any = MoE(VOCABULARY, CONTEXT, 2, 64, 4, experts=EXPERTS, slots=SLOTS)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    model, optimizer, scaler = halfstep.prepare(model, optimizer, "fp32")
    generator, groups = torch.Generator().manual_seed(seed), len(corpora) // world
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        text = windows(corpora.values(), 4, CONTEXT + 1, generator)  # the same on every rank
        if way == "micro-batch, mixed":
            text = text.view(len(corpora), 4, -1).transpose(0, 1).flatten(0, 1)
        text = text.chunk(world)[rank]
        output = model(text[:, :-1])
        loss = F.cross_entropy(output.logits.flatten(0, 1), text[:, 1:].flatten())
        if way != "none":
            for routing in output.routing:
                loss = loss + WEIGHT * balance(routing, WAYS[way](counted(routing, groups)))
        loss.backward()
        if world > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    halfstep.revert(model)
    return model.eval()


@torch.no_grad()
def measured(model: MoE, corpora: Mapping[str, Corpus], count: int) -> dict[str, Any]:
    """Held-out loss in nats per byte, loads relative to the equal share, bits, and the shares of experts by domain."""
    losses, counts = [], []
    for corpus in corpora.values():
        text = held_out(corpus, count, CONTEXT + 1)
        output = model(text[:, :-1])
        losses.append(float(F.cross_entropy(output.logits.flatten(0, 1), text[:, 1:].flatten())))
        counts.append(counted(output.routing[0])[0].double())
    shares = torch.stack(counts) / counts[0].sum()  # by domain
    return {
        "loss": sum(losses) / len(losses),
        "bits": information(shares),
        "load": float(shares.mean(0).max() * EXPERTS),
        "load in a domain": float(shares.max() * EXPERTS),
        "shares": {name: [round(float(s), 4) for s in row] for name, row in zip(corpora, shares, strict=True)},
    }


def information(shares: Tensor) -> float:
    """The mutual information of expert and domain in bits, from p(expert | domain), for equally likely domains."""
    ratio = torch.where(shares > 0, shares / shares.mean(0), 1.0)
    return float((shares * ratio.log2()).sum(1).mean())


def study(way: str, seed: int, steps: int, count: int) -> dict[str, Any]:
    """One run in this process."""
    corpora = domains(CONTEXT)
    return measured(trained(way, seed, steps, corpora), corpora, count)


def _on_rank(rank: int, folder: str, seeds: list[int], steps: int, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    for seed in seeds:
        run = study("all ranks", seed, steps, count)
        if rank == 0:
            torch.save(run, f"{folder}/{seed}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(seeds: list[int], steps: int, count: int) -> list[dict[str, Any]]:
    """The runs in two processes, each with half of the domains."""
    if not seeds:
        return []
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (folder, seeds, steps, count), nprocs=RANKS)
        return [torch.load(f"{folder}/{seed}.pt") for seed in seeds]


def main() -> None:
    """Train, measure, print and save."""
    given = options(__doc__ or "", "runs/balance.json", seeds=3)
    torch.set_num_threads(1)
    steps, count = (1, 1) if given.quick else (300, 64)
    digests = {name: corpus.digest[:16] for name, corpus in domains(CONTEXT).items()}
    kept = Kept(given.out, steps=steps, held_out=count, weight=WEIGHT, rate=RATE, data=digests)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for seed in range(given.seeds):
        for way in [each for each in WAYS if each != "all ranks"]:
            found[way].append(kept.run(f"{way}, seed {seed}", partial(study, way, seed, steps, count)))
    names = {seed: f"all ranks, seed {seed}" for seed in range(given.seeds)}
    missing = [seed for seed, name in names.items() if name not in kept.runs]
    made = dict(zip(missing, on_ranks(missing, steps, count), strict=True))
    found["all ranks"] = [kept.run(name, partial(made.get, seed)) for seed, name in names.items()]
    alone = kept.run("all micro-batches in one process, seed 0", partial(study, "all ranks", 0, steps, count))
    parted = abs(alone["loss"] - found["all ranks"][0]["loss"])
    print(f"\ntwo ranks and one process, the same seed: losses {parted:.2g} apart")
    keys = ("loss", "bits", "load", "load in a domain")
    values = {way: {key: [run[key] for run in runs] for key in keys} for way, runs in found.items()}
    print(f"\n{given.seeds} seeds, mean (95% interval):")
    table(("balanced over", *keys), [(way, *(text(each[key]) for key in keys)) for way, each in values.items()])
    against: dict[str, Any] = {}
    for way in ("none", "micro-batch, mixed", "buffered", "all ranks"):
        each = {key: difference(values[way][key], values["micro-batch"][key]) for key in ("loss", "bits")}
        against[way] = {key: asdict(interval) for key, interval in each.items()}
        loss, bits = each["loss"], each["bits"]
        print(
            f"{way}, against micro-batch: loss {loss.low:+.4f} to {loss.high:+.4f} ({signed(loss, 'better', 'worse')}),"
        )
        print(f"  bits {bits.low:+.3f} to {bits.high:+.3f} ({signed(bits, 'less', 'more')})")
    means = {way: {key: fmean(each[key]) for key in keys} for way, each in values.items()}
    kept.write(against=against, means=means, ranks_and_one_process=parted)
    picture(found, given.out.with_suffix(".png"))


def picture(found: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Bits and loss of every run, and the experts that take each domain's tokens, for the first seed."""
    figure, (left, *maps) = plt.subplots(1, 3, figsize=(11, 4), layout="constrained", width_ratios=(1.3, 1, 1))
    for mark, (way, runs) in zip("x+so^", found.items(), strict=True):
        left.plot([run["bits"] for run in runs], [run["loss"] for run in runs], mark, label=way)
    left.set(xlabel="bits that the expert tells of the domain", ylabel="held-out loss, nats a byte")
    figure.legend(loc="outside lower left", ncols=len(found), title="balanced over", fontsize="small")
    for axes, way in zip(maps, ("micro-batch", "all ranks"), strict=True):
        shares = found[way][0]["shares"]
        shown = axes.imshow([*shares.values()], vmin=0, vmax=0.5, cmap="Blues", aspect="auto")
        axes.set(yticks=range(len(shares)), yticklabels=shares, xlabel="expert", title=f"{way}, seed 0")
    figure.colorbar(shown, ax=maps, label="share of the domain's tokens")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
