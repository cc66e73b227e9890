"""Whether a change moved any bit: trains every recipe with this tree's sources and another commit's, and compares.

    python tests/golden.py [COMMIT] [--recipes A,B] [--compiled]

Three models (an MLP, a GPT with tied embeddings, a convolutional network with an LSTM) take five steps each on the same
machine and thread count; losses, weights, optimizer states and scaler states must be equal bit for bit. Nothing is
stored, since processors differ in the last bit. COMMIT defaults to HEAD.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parent.parent


def models():
    """(model, batch, loss) functions by model name; weights have a fixed seed."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Gated(nn.Module):
        def __init__(self, width, inner):
            super().__init__()
            self.gate_proj = nn.Linear(width, inner, bias=False)
            self.up_proj = nn.Linear(width, inner, bias=False)
            self.down_proj = nn.Linear(inner, width, bias=False)
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
            self.mlp = Gated(width, 2 * width)

        def forward(self, x):
            y = self.norm1(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    class GPT(nn.Module):
        def __init__(self, width=32, vocabulary=48):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(2))
            self.norm = nn.LayerNorm(width)
            self.lm_head = nn.Linear(width, vocabulary, bias=False)
            self.lm_head.weight = self.embedding.weight

        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.lm_head(self.norm(x))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3, padding=1)
            self.norm = nn.BatchNorm2d(16)
            self.mlp = Gated(16, 32)
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.head = nn.Linear(16, 8)

        def forward(self, images):
            x = self.norm(self.conv(images)).relu().mean(-1).transpose(1, 2)
            return self.head(self.lstm(self.mlp(x))[0][:, -1])

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mlp, self.norm = nn.Linear(16, 32), Gated(32, 48), nn.LayerNorm(32)
            self.last = nn.Linear(32, 8)

        def forward(self, x):
            return self.last(self.norm(self.mlp(F.gelu(self.first(x)))))

    def entropy(output, target):
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    tokens = torch.randint(48, (4, 16), generator=torch.Generator().manual_seed(1))
    noise = torch.Generator().manual_seed(2)
    rows, images = torch.randn(24, 16, generator=noise), torch.randn(6, 3, 8, 8, generator=noise)
    return {
        "mlp": (MLP, rows, torch.arange(24) % 8, entropy),
        "gpt": (GPT, tokens, tokens.roll(-1, 1), entropy),
        "network": (Network, images, torch.arange(6), entropy),
    }


def trained(name, model, batch, target, loss_of, compiled):
    """Losses and all states after five steps, or the error that ended training."""
    import torch

    import halfstep
    from halfstep.recipe import get_recipe

    torch.manual_seed(0)
    try:
        model = model()
        if get_recipe(name).unit_scaled:
            halfstep.unit_scale(model, batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, scaler = halfstep.prepare(model, optimizer, name, generator=3, total_steps=5)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        losses = []
        for _ in range(5):
            loss = loss_of(called(batch), target)
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, model.state_dict(), optimizer.state_dict(), scaler.state_dict()
    except Exception as error:  # both versions must reject the same recipes
        return f"{type(error).__name__}: {error}"


def leaves(tree, path=""):
    """The tensors and numbers of a nested state, with their paths."""
    import torch

    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{path}/{place}")
    elif isinstance(tree, torch.Tensor):
        plain = tree.detach().clone().contiguous()
        yield path, (str(plain.dtype), tuple(plain.shape), bytes(plain.cpu().flatten().view(torch.uint8).numpy()))
    else:
        yield path, str(tree)


def run(recipes, compiled, out):
    """Train with the sources on PYTHONPATH and write the results to `out`."""
    import pickle
    import warnings

    import torch

    from halfstep.recipe import list_recipes

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name in recipes or list_recipes():
        for kind, setup in models().items():
            torch._dynamo.reset() if compiled else None
            found[f"{name} {kind}"] = dict(leaves(trained(name, *setup, compiled)))
    Path(out).write_bytes(pickle.dumps(found))


def compare(commit, options):
    """Train with both versions, print the differences, and return the number of differing runs."""
    import pickle

    found = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", base, commit], cwd=ROOT, check=True)
        try:
            runs = []
            for place, tree in enumerate((base, ROOT)):
                environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
                command = [sys.executable, __file__, *options, "--out", str(Path(folder, str(place)))]
                runs.append(subprocess.Popen(command, env=environment, cwd=folder))
            if sum(each.wait() != 0 for each in runs):
                raise SystemExit("a run ended early: see above")
            found = [pickle.loads(Path(folder, str(place)).read_bytes()) for place in range(2)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)
    before, after = found
    differing = [key for key in before | after if before.get(key) != after.get(key)]
    for key in differing:
        old, new = before.get(key, {}), after.get(key, {})
        places = [place for place in old | new if old.get(place) != new.get(place)]
        words = [str(each.get("", "trained"))[:300] for each in (old, new)]
        print(f"{key}: {len(places)} of {len(new)} differ, first {places[0] or ' / '.join(words)}")
    refused = sum("" in each for each in before.values())
    print(f"{len(before)} runs, {refused} of them refused, {len(differing)} differ")
    return len(differing)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--recipes", default="", help="names, with commas; all of them unless named")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile(backend='aot_eager')")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        run([name for name in arguments.recipes.split(",") if name], arguments.compiled, arguments.out)
    else:
        flags = ["--recipes", arguments.recipes, *(["--compiled"] if arguments.compiled else [])]
        sys.exit(bool(compare(arguments.commit, flags)))
