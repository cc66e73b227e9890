"""The matrix's column for PEFT: LoRA adapters added before `prepare`, or between `apply` and `optimize`."""

from functools import cache

import torch
from lora import adamw, adapted, llama, train, trained

import halfstep
from halfstep.ops.part import part_of
from tiny import BREAKS


COLUMN = "PEFT"


def trains(recipe):
    expected = _fp32()
    for losses in (_prepared(recipe), _in_two_steps(recipe)):
        torch.testing.assert_close(losses, expected, rtol=0.1 if recipe in BREAKS else 0.02, atol=0)
        assert losses[-1] < losses[0]


@cache
def _fp32():
    return torch.tensor(_plain(adapted(llama())))


def _plain(model):
    return train(model, adamw(model), halfstep.LossScaler(enabled=False))


def _prepared(recipe):
    model = adapted(llama())
    model, optimizer, scaler = halfstep.prepare(model, adamw(model), recipe=recipe, generator=3)
    return _looked_at(model, optimizer, scaler)


def _in_two_steps(recipe):
    model = llama()
    halfstep.apply(model, recipe)
    model = adapted(model)
    optimizer, scaler = halfstep.optimize(model, adamw(model), generator=3)
    return _looked_at(model, optimizer, scaler)


def _looked_at(model, optimizer, scaler):
    losses = train(model, optimizer, scaler)
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    for name, module in model.named_modules():
        spec = part_of(module).linear
        assert spec is None or not spec.rounds or "lora_" not in name
    return torch.tensor(losses)
