"""DiLoCo with outer gradients in few bits: torchrun --nproc-per-node 2 examples/diloco.py --send mxfp4

Each rank trains its own copy of a small GPT for ten steps under a recipe. Then the change of its weights is sent in few
bits, as a gradient, and an optimizer with Nesterov momentum computes the weights from which all ranks continue
(Douillard et al. 2023, arXiv 2311.08105). `--send all --seeds 3` compares the formats with data parallelism, which
exchanges gradients in float32 in each step.
"""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F

import halfstep
from halfstep import formats
from halfstep.lab.models.gpt import GPT
from halfstep.lab.task import VOCABULARY, Corpus, load_corpus
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import FP4, Communication, get_storage


def blocks(format: str, rule: str, size: int) -> Communication:
    """Gradients in a format with a scale per `size` elements; below 8 bits, errors are added to the next round's."""
    quantizer = Quantizer(formats.get(format), scales=Scales(Tile(1, size), get_scaling(rule)))
    return Communication(gradients=get_storage(quantizer, flat=True), error_feedback=formats.get(format).bits < 8)


SENT = {
    "fp32": Communication(gradients=get_storage("fp32")),
    "int8": blocks("int8", "absmax", 128),
    "e3m0": blocks("e3m0", "rceil", 32),
    "mxfp4": FP4,
}
CONTEXT, BATCH, INNER = 64, 8, 10


def train(send: str, seed: int, corpus: Corpus, rounds: int = 15, recipe: str = "bf16-mixed") -> tuple[float, float]:
    """The final held-out loss, and the total number of bytes per parameter that this rank has sent.

    Args:
        send: the format of outer gradients; "every step" is data parallelism instead.
    """
    torch.manual_seed(seed)
    outer, alone = GPT(VOCABULARY, CONTEXT, 2, 64, 4), send != "every step"
    model, steps = copy.deepcopy(outer), rounds * INNER
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: min(1, (step + 1) / 20) * (1 - step / steps))
    model, inner, scaler = halfstep.prepare(model, inner, recipe)
    outward = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    stream, sent = torch.Generator().manual_seed(1000 * seed + dist.get_rank()), 0
    for step in range(steps):
        scaler.scale(loss_of(model, corpus, "train", stream)).backward()
        if not alone:
            sent = halfstep.distributed.reduce_gradients(model, SENT["fp32"]).exchange.sent
        scaler.step(inner)
        scaler.update()
        scheduler.step()
        inner.zero_grad()
        if alone and (step + 1) % INNER == 0:
            for start, now in zip(outer.parameters(), model.parameters(), strict=True):
                start.grad = start.detach() - now.detach()
            sent = halfstep.distributed.reduce_gradients(outer, SENT[send]).exchange.sent
            outward.step()
            with torch.no_grad():
                for start, now in zip(outer.parameters(), model.parameters(), strict=True):
                    now.copy_(start)
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [loss_of(model, corpus, "held_out", stream) for _ in range(64)]
    return float(torch.stack(losses).mean()), sent / sum(p.numel() for p in outer.parameters())


def loss_of(model: torch.nn.Module, corpus: Corpus, split: str, stream: torch.Generator) -> torch.Tensor:
    """The cross-entropy of the next byte, over a batch of windows."""
    length = len(corpus.train if split == "train" else corpus.held_out) - CONTEXT - 1
    window = corpus.windows(split, torch.randint(0, length, (BATCH,), generator=stream), CONTEXT + 1)
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DiLoCo with outer gradients in few bits.")
    parser.add_argument("--send", choices=[*SENT, "every step", "all"], default="mxfp4")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    data = load_corpus(None, CONTEXT)
    for way in ["every step", *SENT] if given.send == "all" else [given.send]:
        for number in range(given.seeds):
            found, crossed = train(way, number, data, given.rounds)
            if dist.get_rank() == 0:
                print(f"{way}, seed {number}: loss {found:.4f}, {crossed:.2f} bytes a parameter sent", flush=True)
    dist.destroy_process_group()
