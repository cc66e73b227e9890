"""Run every halfstep command once, on small inputs, in this process, and print the outcomes as JSON.

For environments without pytest: `python every_command.py FOLDER [--quick] [MODULE ...]` works in FOLDER and hides each
MODULE from every import, as if it were not installed. --quick leaves out commands that take seconds."""

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path


MODEL = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 32))
"""
TRAIN = """
from own import small
import torch
from torch.optim import SGD

model = small()
optimizer = SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
"""
RUN = ["--steps", "2", "--seeds", "1", "--batch", "2"]
PROBED = ["own.py:small", "--batches", "1", "--context", "8"]

# Each command line, the extra of pyproject.toml that it needs (None for a plain installation), and its exit code then.
COMMANDS = [
    (["compare", "--recipes", "bf16-mixed", "--baseline-seeds", "1", *RUN, "--out", "compared"], "lab", 0),
    (["train", *RUN, "--out", "trained"], "lab", 0),
    (["sweep", "run", "--recipes", "fp32", *RUN, "--grid", "lr=1e-3,1e-2", "--jobs", "1", "--out", "swept"], "lab", 0),
    (["sweep", "status", "swept"], "lab", 0),
    (["sweep", "report", "swept"], "lab", 0),
    (["sweep", "leads", "swept"], "lab", 1),  # its runs have no sharpness
    (["sweep", "causes", "swept"], "lab", 1),  # and no tensors
    (["law", "round", "swept", "--bits", "2"], "lab", 0),
    (["law", "fit", "swept"], "lab", 2),  # too few runs
    (["law", "predict", "--parameters", "1e9", "--tokens", "2e10", "--bits", "8"], None, 0),
    (["doctor", "fp32"], None, 0),
    (["inspect", "a.safetensors"], None, 0),
    (["inspect", "a.safetensors", "--json"], None, 0),
    (["inspect", "a.safetensors", "--html", "a.html"], "lab", 0),
    (["inspect", "a.safetensors", "--plot", "a.png"], "lab", 0),
    (["diff", "a.safetensors", "b.safetensors"], None, 1),
    (["export", "--list"], None, 0),
    (["export", "folder", "exported"], "hf", 0),
    (["probe", *PROBED], None, 0),
    (["mismatch", *PROBED], None, 0),
    (["audit", "--steps", "2", "train.py"], None, 0),
    (["probe", "folder"], "hf", 0),
    (["scales", *PROBED], None, 0),
    (["scales", *PROBED, "--plot", "s.png"], "lab", 0),
    (["scales", "cnn", "--task", "vision", "--batch", "2"], "lab", 0),
    (["scales", "transformer", "--task", "pronunciation", "--batch", "2"], "words", 0),
    (["memory", "own.py:small", "--batch", "2", "--seq", "8"], None, 0),
    (["memory", "own.py:small", "--batch", "2", "--seq", "8", "--plot", "m.png"], "lab", 0),
    (["memory", "galore-60m", "--seq", "8"], "hf", 0),
    (["formats"], None, 0),
    (["formats", "show", "e4m3fn"], None, 0),
    (["formats", "show", "e4m3fn", "--plot", "f.png"], "lab", 0),
    (["formats", "compare", "e4m3fn", "e5m2"], None, 0),
    (["formats", "add", "bf16", "1", "0.001"], None, 0),
    (["recipes"], None, 0),
    (["recipes", "show", "fp8-delayed"], None, 0),
    (["recipes", "plan", "own.py:small", "--recipe", "fp8-delayed"], None, 0),
    (["recipes", "cost", "fp8-delayed", "--model", "own.py:small", "--seq", "8"], None, 0),
    (["kb", "add", "--help"], None, 0),  # it asks questions
    (["kb", "check", "albert", "--use", "fp16"], None, 1),
    (["kb", "show", "albert"], None, 0),
    (["kb", "search", "bfloat16"], None, 0),
    (["kb", "list"], None, 0),
    (["kb", "model-card", "albert"], None, 0),
    (["kb", "validate"], None, 0),
    (["kb", "export", "--format", "json", "--output", "kb.json"], None, 0),
    (["site", "site.html"], "lab", 0),
    (["claims"], None, 0),
    (["claims", "show", "forum-bytes"], None, 0),
]


class Hidden:
    """A module finder that does not find the given modules."""

    def __init__(self, finder, modules):
        self.finder, self.modules = finder, modules

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.modules else self.finder.find_spec(name, path, target)


def commands():
    """The words of every halfstep command."""
    from halfstep.cli.app import COMMANDS, load

    def walk(command, words=()):
        if not hasattr(command, "commands"):
            yield words
            return
        if command.invoke_without_command and words:
            yield words
        for name, inner in command.commands.items():
            yield from walk(inner, (*words, name))

    return [words for name in COMMANDS for words in walk(load(name), (name,))]


def prepare():
    """Write the files that the commands read, in the current folder."""
    import torch
    from safetensors.torch import save_file

    Path("own.py").write_text(MODEL)
    Path("train.py").write_text(TRAIN)
    for name in "ab":
        save_file({"layer.weight": torch.randn(8, 8)}, f"{name}.safetensors")
    Path("folder").mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 1, "n_embd": 8}
    Path("folder", "config.json").write_text(json.dumps({**config, "vocab_size": 32, "n_positions": 16}))


def run_command(words):
    """Exit code, standard output and error of a command, with the traceback if it raised."""
    from halfstep.cli.app import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["halfstep", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code or 0
        except BaseException:
            code = traceback.format_exc()
    return {"words": words, "code": code, "out": out.getvalue()[-2000:], "err": err.getvalue()[-2000:]}


def failure_of(result):
    """Why a command failed without naming the missing extra, as a message; None if it worked or named it."""
    words, extra, code, err = (result[key] for key in ("words", "extra", "code", "err"))
    wanted = f"'halfstep[{extra}]'"
    if code == result["expected"] or (code == 2 and extra is not None and wanted in " ".join(err.split())):
        return None
    works = f"exit code {result['expected']}" + (f" or a message with {wanted}" if extra else "")
    return f"halfstep {' '.join(words)}: exit code {code}, expected {works}\n{err}"


def run_all(folder, modules, quick):
    """The outcome of each line of COMMANDS, run in the folder without the modules, and the words of all commands."""
    os.chdir(folder)
    sys.meta_path[:] = [Hidden(finder, modules) for finder in sys.meta_path]
    prepare()
    results = []
    for words, extra, code in COMMANDS:
        unmade = words == ["sweep", "status", "swept"] and not Path("swept").exists()  # needs a sweep
        if not unmade and not (quick and words[0] == "doctor"):
            results.append({**run_command(words), "extra": extra, "expected": code})
    return {"results": results, "commands": [list(words) for words in commands()]}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        words = [word for word in sys.argv[2:] if word != "--quick"]
        found = run_all(sys.argv[1], words, "--quick" in sys.argv)
        lines = [line for line in map(failure_of, found["results"]) if line]
        print(*lines, sep="\n")
    json.dump(found, sys.stdout)
    sys.exit(bool(lines))
