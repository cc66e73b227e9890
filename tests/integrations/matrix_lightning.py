"""The matrix's column for Lightning: accumulation, clipping and a scheduler equal the documented loop bit for bit."""

import logging
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from matrix_accelerate import ACCUMULATED, CLIP, EPOCHS, documented_loop, loader, name_of, schedule

from halfstep.integrations.lightning import HalfstepPrecision
from tiny import adamw, assert_same, model_for


COLUMN = "Lightning"
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


class Module(LightningModule):
    """A module whose `training_step` calls a submodule, and whose scheduler steps after every optimizer step."""

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
    """The model under the attribute name that the Lightning module uses."""

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
        # Lightning's own: the number of loader workers, deprecations of torch
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(), ckpt_path=resume)
    return {name.removeprefix("net."): value.clone() for name, value in module.state_dict().items()}


def trains(recipe):
    found = documented_loop(recipe, within=Within)  # noise depends on layer paths
    assert_same(fit(trainer_of(recipe), Module(recipe)), {name.removeprefix("net."): w for name, w in found.items()})
