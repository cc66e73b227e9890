"""Activation checkpointing as libraries enable it: bytes saved for backward, and how often layers run."""

from functools import partial
from itertools import product

import pytest
import torch
from lora import adapted, trained
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.utils.checkpoint import checkpoint
from trainers import examples, llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import halfstep
from families import for_each, in_turn
from halfstep.ops import values_of
from tiny import ALL, UNIT, assert_same


pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")  # older name
UNSCALED = "no recipe"
STAGES = "fp8-delayed until 50%, then bf16-mixed"
BATCH = {name: row[None] for name, row in examples(rows=1, length=16)[0].items()}


def by_transformers(model, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def by_wrappers(model, reentrant):
    """As accelerate and Lightning do for FSDP: each layer in torch's checkpoint wrapper."""
    kinds = wrapping.CheckpointImpl
    wrapper = partial(wrapping.checkpoint_wrapper, checkpoint_impl=kinds.REENTRANT if reentrant else kinds.NO_REENTRANT)
    wrapping.apply_activation_checkpointing(model, wrapper, lambda m: isinstance(m, LlamaDecoderLayer))


ORDERS = {
    f"{how.__name__}, {'before' if before else 'after'}, {'' if reentrant else 'not '}reentrant": (
        how,
        before,
        reentrant,
    )
    for how, before, reentrant in product((by_transformers, by_wrappers), (True, False), (False, True))
}


def prepared(name, order=None):
    """A Llama under a recipe, checkpointed before or after the recipe is applied."""
    how, before, reentrant = ORDERS.get(order, (None, True, False))
    model = llama(use_cache=False).train()
    if order and before:
        how(model, reentrant)
    if name == UNSCALED or name in UNIT:
        halfstep.unit_scale(model, **BATCH)
    if name not in (None, UNSCALED):
        halfstep.apply(model, name)
    if order and not before:
        how(model, reentrant)
    return model


def run_passes(model):
    """The bytes saved for backward, how often an MLP runs, the loss and the gradients."""
    runs, held = [], {}
    mlp = next(module for name, module in model.named_modules() if name.endswith(".mlp"))
    hook = mlp.register_forward_pre_hook(lambda *_: runs.append(None))
    weights = {p.untyped_storage()._cdata for p in model.parameters() if type(p) is nn.Parameter}

    def pack(x):
        memory = x.untyped_storage()
        if memory._cdata not in weights:
            held[memory._cdata] = memory.nbytes()
        return x

    torch.manual_seed(7)
    with saved_tensors_hooks(pack, lambda x: x):
        loss = model(**BATCH).loss
    loss.backward()
    hook.remove()
    named = ((name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in model.named_parameters())
    found = {name: values_of(p.grad) for name, p in named if p.grad is not None}
    return sum(held.values()), len(runs), [loss.item(), found]


HOLDS = 0.5  # at most this share of the bytes without checkpointing: layer inputs, and what the head and the loss save
QUICK = [
    UNSCALED, "coat", STAGES, "unit-fp8", "bf16-mixed", "fp16-lists", "bf16-stochastic", "fp8-delayed",
    "fp8-smooth-swiglu", "nvfp4", "fp8lm-o2",
]  # fmt: skip


def check(name, order):
    """Layers run twice, fewer bytes are saved, and no bit changes."""
    plain, once, expected = run_passes(prepared(name))
    held, runs, found = run_passes(prepared(name, order))
    assert (once, runs) == (1, 2)
    assert held < HOLDS * plain
    assert_same(found, expected)


@for_each("name, order", in_turn(QUICK, list(ORDERS)))
def test_checkpointed_layers_run_twice_and_save_less(name, order):
    check(name, order)


@pytest.mark.slow
@for_each("name, order", product([None, UNSCALED, STAGES, *ALL], ORDERS))
def test_checkpointed_layers_under_every_recipe_and_order(name, order):
    check(name, order)


@for_each(
    "order, reentrant", product(("adapters, recipe", "recipe, adapters", "adapters, recipe, switch"), (False, True))
)
def test_layers_with_adapters_are_checkpointed(order, reentrant):
    model = llama(use_cache=False)
    for step in order.split(", "):
        if step == "adapters":
            if "switch" not in order:
                by_transformers(model, reentrant)
            model.enable_input_require_grads()
            model = adapted(model)
        elif step == "recipe":
            halfstep.apply(model, "fp8-delayed")
        else:
            by_transformers(model, reentrant)
    _, runs, (_, found) = run_passes(model.train())
    assert runs == 2
    assert all("lora_" in name and grad.isfinite().all() for name, grad in found.items())
    assert len(found) == len(trained(model))


class Diffuser(nn.Module):
    """Blocks checkpointed as in diffusers' models: the root calls `_gradient_checkpointing_func`."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        self.gradient_checkpointing = False

    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = lambda module, *args: checkpoint(
            module.__call__, *args, use_reentrant=False
        )

    def forward(self, x):
        for block in self.blocks:
            again = torch.is_grad_enabled() and self.gradient_checkpointing
            x = self._gradient_checkpointing_func(block, x) if again else block(x)
        return x


@for_each("before", [False, True])
def test_diffusers_style_blocks_are_checkpointed(before):
    model, runs = Diffuser().train(), []
    model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(None))
    if before:
        model.enable_gradient_checkpointing()
    halfstep.apply(model, "bf16-mixed")
    model.enable_gradient_checkpointing()
    model(torch.ones(2, 8)).sum().backward()
    assert len(runs) == 2
