"""nanoGPT's training script: its loop, groups, clipping and checkpoints, with two lines added and one changed."""

import io
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from ways import relative_distance, under, values, way

import halfstep
from tiny import SMOOTH, Gated, assert_same


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width, heads, is_gated):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        plain = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = Gated(width, 2 * width) if is_gated else nn.Sequential(*plain)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A transformer block with tied embedding and head; forward returns logits and loss, as nanoGPT's."""

    def __init__(self, is_gated=False, vocabulary=16, context=12, width=16, heads=2, layers=1):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(context, width),
                "h": nn.ModuleList([Block(width, heads, is_gated) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(4) if name.endswith("c_proj.weight") else 0.1)

    def forward(self, tokens, targets=None):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def get_batch(seed):
    """Sequences that count up by one or two from a random start."""
    generator = torch.Generator().manual_seed(seed)
    start, by = (torch.randint(low, high, (8, 1), generator=generator) for low, high in ((0, 16), (1, 3)))
    tokens = (start + by * torch.arange(13)) % 16
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def get_lr(iteration, warmup=3, decay=40, highest=1e-2, lowest=1e-3):
    if iteration < warmup:
        return highest * (iteration + 1) / (warmup + 1)
    share = min((iteration - warmup) / (decay - warmup), 1.0)
    return lowest + 0.5 * (1 + math.cos(math.pi * share)) * (highest - lowest)


class Script:
    """train.py's state: a model, an optimizer and a scaler, from scratch or from a checkpoint."""

    def __init__(self, name, checkpoint=None, compiles=False, clips_by_scaler=False, is_gated=False):
        self.clips_by_scaler, self.iteration = clips_by_scaler, 0
        torch.manual_seed(1337)
        model = GPT(is_gated or name in SMOOTH)
        if checkpoint is not None:
            prefix = "_orig_mod."
            state = {key.removeprefix(prefix): value for key, value in checkpoint["model"].items()}
        optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=1e-2, betas=(0.9, 0.95))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        if name is not None:
            model, optimizer, scaler = halfstep.prepare(model, optimizer, name, generator=3)  # added
        if checkpoint is not None:
            model.load_state_dict(state)
            optimizer.load_state_dict(checkpoint["optimizer"])
            scaler.load_state_dict(checkpoint["scaler"]) if checkpoint["scaler"] else None  # added
            self.iteration = checkpoint["iter_num"]
        self.raw_model, self.optimizer, self.scaler = model, optimizer, scaler
        self.model = torch.compile(model, backend="eager") if compiles else model

    def train(self, iterations, micro_steps=2, grad_clip=1.0):
        """Iterations of train.py; returns their losses."""
        losses = []
        for self.iteration in range(self.iteration, self.iteration + iterations):  # noqa: B020
            for group in self.optimizer.param_groups:
                group["lr"] = get_lr(self.iteration)
            total = 0.0
            for micro_step in range(micro_steps):
                x, y = get_batch(100 * self.iteration + micro_step)
                _, loss = self.model(x, y)  # no autocast around it: changed
                loss = loss / micro_steps
                total += loss.item()
                self.scaler.scale(loss).backward()
            if self.clips_by_scaler:
                self.scaler.clip_grad_norm_(self.optimizer, grad_clip)
            else:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(total)
        self.iteration += 1
        return losses

    def checkpoint(self):
        """The checkpoint that train.py writes, after saving and loading."""
        file = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        torch.save({"iter_num": self.iteration, **{key: part.state_dict() for key, part in parts.items()}}, file)
        file.seek(0)
        return torch.load(file)


ITERATIONS = 16


@way()
def test_nanogpt(name):
    """nanoGPT's train.py: add `halfstep.prepare` after its optimizer and save the scaler's state; drop its autocast."""
    expected = Script(None, is_gated=name in SMOOTH).train(ITERATIONS)
    losses = Script(under(name), is_gated=name in SMOOTH).train(ITERATIONS)
    assert expected[-1] < 0.8 * expected[0]
    away = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert away < (1e-4 if name == "fp32" else 0.25), f"{away:.3f} from fp32's loss"
    assert away > 1e-5 or name == "fp32"


@way()
def test_nanogpt_resumes(name):
    """nanoGPT's checkpoints: its script, begun again from its checkpoint, continues bit for bit."""
    first = Script(name)
    first.train(3)
    resumed = Script(name, first.checkpoint())
    assert resumed.iteration == first.iteration == 3
    assert resumed.train(3) == first.train(3)
    assert_same(values(resumed.raw_model), values(first.raw_model))


@pytest.mark.slow  # test_graphs.py has fast tests
@way(core=("fp8-delayed",))
def test_nanogpt_compiles(name):
    """nanoGPT compiled: the same numbers; a checkpoint's keys have `_orig_mod.`, which its script strips."""
    torch._dynamo.reset()  # or the recipes before this one count against torch's limit of recompilations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, as it traces
        compiled, eager = Script(name, compiles=True), Script(name)
        assert compiled.train(2) == eager.train(2)
        saved = compiled.checkpoint()
        assert all(key.startswith("_orig_mod.") for key in saved["model"])
        assert compiled.train(1) == Script(name, saved).train(1) == eager.train(1)
    assert_same(values(compiled.raw_model), values(eager.raw_model))


@way()
def test_nanogpt_clips(name):
    """nanoGPT's clipping: its `unscale_` and `torch.nn.utils.clip_grad_norm_` do what `scaler.clip_grad_norm_` does."""
    ours, theirs = Script(name, clips_by_scaler=True), Script(name)
    start = values(ours.raw_model)
    a, b = (script.train(4, grad_clip=0.05) for script in (ours, theirs))
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 0.05
    assert relative_distance(values(theirs.raw_model), values(ours.raw_model), start) < 0.1
