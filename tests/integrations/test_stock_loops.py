"""Models under `halfstep.apply` in other libraries' loops with stock optimizers: what is lost is warned of once.

With a loss scaler of torch nothing is lost and there is no warning."""

import warnings

import pytest
import torch
import transformers
from accelerate import Accelerator
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset
from trainers import arguments, examples, llama

import halfstep
from tiny import mlp


def in_trainer(name, scaler, folder):
    model = llama()
    halfstep.apply(model, name)
    trainer = transformers.Trainer(model, arguments(folder, max_steps=3), train_dataset=examples())
    trainer.accelerator.scaler = scaler
    trainer.train()


def in_accelerate(name, scaler, folder):
    model = mlp()
    halfstep.apply(model, name)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


class Module(LightningModule):
    def __init__(self, name):
        super().__init__()
        self.net = mlp()
        halfstep.apply(self.net, name)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def in_lightning(name, scaler, folder):
    plugins = [] if scaler is None else [MixedPrecision("16-mixed", "cpu", scaler)]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(max_steps=3, accelerator="cpu", plugins=plugins, **quiet)
    trainer.fit(Module(name), DataLoader(TensorDataset(torch.ones(6, 8)), batch_size=2))


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_trainer, in_accelerate, in_lightning])
def test_losses_are_warned_of_once(loop, tmp_path):
    for name, scaler, expected in (
        ("bf16-master", None, "it keeps no masters"),
        ("fp16-mixed", None, "the loss is not scaled"),
        ("fp16-mixed", torch.amp.GradScaler("cpu"), None),
        ("bf16-mixed", None, None),
    ):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loop(name, scaler, tmp_path)
        found = [str(warning.message) for warning in told if "follows recipe" in str(warning.message)]
        assert len(found) == (expected is not None)
        assert all(expected in said for said in found)
