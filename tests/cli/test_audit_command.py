"""`halfstep audit`: runs scripts with their own arguments and reports their lost updates."""

import json
import re
import sys

import pytest


PLAIN = """
import argparse
from torch import nn
from torch.optim import AdamW
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--steps", type=int)
parser.add_argument("--float32", action="store_true")
asked = parser.parse_args()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def main():
    model = Model()
    if not asked.float32:
        model.bfloat16()
    optimizer = AdamW(model.parameters(), lr=asked.lr)
    for step in range(asked.steps):
        x = torch.randn(4, 8).to(model.up.weight.dtype)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"__main__ ended after {asked.steps} steps in {__file__}")


if __name__ == "__main__":
    main()
"""
NANOGPT = """
import os
import model_of_mine  # beside the script
import torch

device_type = "cpu"
model = model_of_mine.GPT().to(torch.bfloat16)
optimizer = model.configure_optimizers(1e-5)
scaler = torch.amp.GradScaler(device_type, enabled=False)
iter_num, raw_model = 0, model
while True:
    for group in optimizer.param_groups:
        group["lr"] = 1e-5 * min(1.0, (iter_num + 1) / 4)
    for micro_step in range(2):
        with torch.amp.autocast(device_type, torch.bfloat16):
            _, loss = model(torch.randint(16, (4, 8)))
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
"""
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(16, 16), "ln_f": nn.LayerNorm(16)})
        self.lm_head = nn.Linear(16, 16, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx):
        logits = self.lm_head(self.transformer.ln_f(self.transformer.wte(idx)))
        return logits, F.cross_entropy(logits.flatten(0, 1), idx.flatten())

    def configure_optimizers(self, lr):
        groups = [{"params": [p for p in self.parameters() if (p.dim() > 1) is two]} for two in (True, False)]
        return torch.optim.AdamW(groups, lr=lr)
"""
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).bfloat16().save_pretrained("model")
model = LlamaForCausalLM.from_pretrained("model")  # in the 16 bits of the file
data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 12))]
args = TrainingArguments("out", max_steps=30, learning_rate=1e-5, use_cpu=True, report_to=[], disable_tqdm=True)
Trainer(model=model, args=args, train_dataset=data).train()
raise AssertionError("it was not ended")
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in {"plain.py": PLAIN, "nanogpt.py": NANOGPT, "model_of_mine.py": MODEL, "hf.py": TRAINER}.items():
        (tmp_path / name).write_text(text)


def flat(text):
    return re.sub(r"\s+", " ", text)


def test_plain_loop_is_run_with_its_arguments_and_stopped(run):
    code, out, _ = run("audit", "plain.py", "--lr", "1e-5", "--steps", "1000")
    assert code == 1
    assert re.search(
        r"^Your updates are being lost: 9\d(\.\d)?% of them at lr = 1e-05 \(step 10; 5\d\d compared\)", out
    )
    assert 'halfstep.prepare(model, optimizer, recipe="bf16-6byte")' in out
    assert "14% at 1e-05" in flat(out)
    assert "Model, AdamW: 552 trained parameters, 10 steps" in out
    assert "ended after" not in out


def test_script_that_ends_and_loses_nothing_exits_0(run):
    code, out, _ = run("audit", "python", "-u", "plain.py", "--lr", "1e-3", "--steps", "4", "--float32")
    assert code == 0
    assert "__main__ ended after 4 steps in plain.py" in out
    assert "Your updates arrive, 552 parameters in float32: none of them were lost at lr = 0.001 (step 4" in flat(out)
    assert "fix it" not in out


@pytest.mark.parametrize("words", [("--module", "plain"), ("-m", "plain"), ("python", "-m", "plain")])
def test_module_steps_and_save_options(run, tmp_path, words):
    (tmp_path / "plain.py").write_text(PLAIN)
    code, _, _ = run("audit", "--steps", "3", "--save", "found.json", *words, "--lr", "1e-5", "--steps", "8")
    (report,) = json.loads((tmp_path / "found.json").read_text())
    assert (code, report["loses"], report["updates"][0]["step"]) == (1, True, 3)


def test_whole_option_runs_to_the_end(run):
    code, out, _ = run("audit", "--whole", "plain.py", "--lr", "1e-5", "--steps", "14")
    assert (code, "ended after 14 steps" in out, "(step 14; " in out) == (1, True, True)


def test_nanogpt_style_loop_with_local_modules(run):
    code, out, _ = run("audit", "nanogpt.py")
    assert code == 1
    assert "Your updates are being lost: 9" in out
    assert "lr = 1e-05 (step 10; " in out
    assert "GPT, AdamW: 288 trained parameters, 10 steps" in out


@pytest.mark.slow
def test_remedy_for_transformers_trainer_is_halfstep_trainer(run):
    code, out, _ = run("audit", "hf.py")
    assert code == 1
    assert "Your updates are being lost: 9" in out
    assert "lr = 7e-06 (step 10; " in out  # its linear schedule falls
    assert "a schedule reaches 1e-05)" in flat(out)
    assert "from halfstep.integrations.transformers import HalfstepTrainer as Trainer" in out
    assert "LlamaForCausalLM, AdamW" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("absent.py",), 2, "'absent.py' is no file; expected a Python script"),
        (("absent",), 2, "or the module: halfstep audit -m absent"),
        (("torchrun", "plain.py"), 2, "torchrun starts other processes.*torchrun -m halfstep audit plain.py"),
        (("accelerate", "launch", "a.py"), 2, "accelerate launch -m halfstep audit a.py"),
        (("python", "-c", "pass"), 2, "no script after python; expected halfstep audit train.py"),
        (("--save", "no/where.json", "plain.py"), 2, "cannot write 'no/where.json': its folder does not exist"),
        (("plain.py", "--lr", "1e-5", "--steps", "0"), 2, "no torch optimizer took a step"),
        (("plain.py", "--unknown"), 2, "unrecognized arguments: --unknown"),
    ],
)
def test_bad_arguments_exit_2(run, words, code, message):
    found, _, errors = run("audit", *words)
    assert found == code
    assert re.search(message, flat(errors))


def test_failing_script_shows_its_traceback_and_the_report(run, tmp_path):
    (tmp_path / "fails.py").write_text(PLAIN.replace("    print(", "    raise ValueError('mine')\n    print("))
    code, out, errors = run("audit", "fails.py", "--lr", "1e-5", "--steps", "2")
    assert (code, "ValueError: mine" in errors, "being lost" in out) == (1, True, True)
    code, out, errors = run("audit", "fails.py", "--lr", "1e-5", "--steps", "0")
    assert (code, "ValueError: mine" in errors, out) == (1, True, "")
