"""The matrix's column of Lightning: accumulation, clipping, a scheduler, bit for bit as the documented loop."""

import logging
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from matrix_accelerate import ACCUMULATED, CLIP, EPOCHS, by_hand, loader, name_of, schedule

from halfstep.integrations.lightning import HalfstepPrecision
from tiny import adamw, assert_same, model_for


COLUMN = "Lightning"
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


class Module(LightningModule):
    """A module whose `training_step` calls a part of it, and whose scheduler moves with the steps."""

    def __init__(self, recipe, seed=0):
        super().__init__()
        self.net = model_for(name_of(recipe))
        if seed:
            for parameter in self.parameters():
                torch.nn.init.normal_(parameter)

    def training_step(self, batch, index):
        x, y = batch
        return F.mse_loss(self.net(x).float(), y)

    def configure_optimizers(self):
        optimizer = adamw(self)
        scheduler = {"scheduler": schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Within(torch.nn.Module):
    """A model where the Lightning module has it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


def trainer_of(recipe, generator=3, total_steps=None, recipe_change="refuse", **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    how = {"generator": generator, "total_steps": total_steps, "recipe_change": recipe_change}
    plugin = HalfstepPrecision(recipe, **how)
    settled = {"accelerator": "cpu", "accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": CLIP}
    return Trainer(plugins=[plugin], max_epochs=EPOCHS, **{**QUIET, **settled, **options})


def fit(trainer, module, resume=None):
    with warnings.catch_warnings():
        # Of Lightning's own: how many workers a loader should have, what torch deprecated in it.
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(), ckpt_path=resume)
    return {name.removeprefix("net."): value.clone() for name, value in module.state_dict().items()}


def trains(recipe):
    found = by_hand(recipe, within=Within)  # noise follows from layers' paths
    assert_same(fit(trainer_of(recipe), Module(recipe)), {name.removeprefix("net."): w for name, w in found.items()})
