"""The matrix's column for Accelerate: accumulation, clipping and a scheduler equal the documented loop bit for bit."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep.integrations.accelerate import prepare
from tiny import adamw, assert_same, batch, model_for


COLUMN = "Accelerate"
EPOCHS, ACCUMULATED, CLIP = 2, 2, 0.5


def loader(rows=6):
    """Four micro-batches."""
    return DataLoader(TensorDataset(*batch(rows=4 * rows)), batch_size=rows)


def name_of(recipe):
    return recipe if isinstance(recipe, str) else recipe.name


def schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def weights(model):
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


def accelerated(recipe, epochs=EPOCHS, seed=0, resume=None, generator=3, **options):
    """The weights, accelerator and optimizer after a loop as Accelerate documents it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = model_for(name_of(recipe))
    if seed:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    optimizer = adamw(model)
    model, optimizer, batches, scheduler = prepare(
        accelerator,
        model,
        optimizer,
        loader(),
        schedule(optimizer),
        recipe=recipe,
        generator=generator + seed,
        **options,
    )
    if resume is not None:
        accelerator.load_state(resume)
    for _ in range(epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights(model), accelerator, optimizer


def documented_loop(recipe, epochs=EPOCHS, within=lambda model: model, **options):
    """The weights after the documented halfstep loop, for a model wrapped by `within`."""
    model = within(model_for(name_of(recipe)))
    optimizer = adamw(model)
    scheduler = schedule(optimizer)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe, generator=3, **options)
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader(), 1):
            scaler.scale(F.mse_loss(model(x), y) / ACCUMULATED).backward()
            if i % ACCUMULATED == 0:
                scaler.clip_grad_norm_(optimizer, CLIP)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
    return weights(model)


def trains(recipe):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    found, _, _ = accelerated(recipe)
    assert_same(found, documented_loop(recipe))
