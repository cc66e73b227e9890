"""Selective activation checkpointing: bits as without, products formed once, and less held between the passes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary

from families import for_each
from tiny import EVERY, assert_same, batch, copied, fast_and_every, grads, model_for, prepared, train


aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default}


STATES = {"bf16-mixed", "coat", "fp8-delayed", "fp8lm-o2", "nvfp4"}
"""One that rounds no operand; and some that write in place while they do: to states, codes, scales."""


def dear(context, operator, *args, **kwargs):
    """As torchtitan's: what is dear to compute is kept."""
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def everything(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def nothing(context, operator, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selected(nn.Module):
    """A body of which a policy says what is kept; without one it is no checkpoint."""

    def __init__(self, name, policy=None):
        super().__init__()
        self.body, self.policy = model_for(name), policy

    def forward(self, x):
        if self.policy is None:
            return self.body(x)
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)


class Seen(TorchDispatchMode):
    """How many products ran, and the memory that was made."""

    def __init__(self):
        super().__init__()
        self.products, self._made = 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.products += operator in PRODUCTS
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._made[tensor.untyped_storage()] = None
        return out

    @property
    def held(self):
        """Bytes."""
        return sum(storage.nbytes() for storage in self._made)


def passed(name, policy):
    """The gradients; products of the forward pass and of both; bytes held between them."""
    model, _, scaler = prepared(name, Selected(name, policy))
    x, y = batch()
    x.requires_grad_()
    with Seen() as seen:
        loss = scaler.scale(F.mse_loss(model(x), y))
        forward, held = seen.products, seen.held
        loss.backward()
    return [grads(model), x.grad], forward, seen.products, held


@pytest.mark.quick("carried-fast")
@pytest.mark.parametrize("names", fast_and_every(EVERY, STATES))
@pytest.mark.usefixtures("products")
def test_products_are_kept_and_no_bit_changes(names):
    @for_each("name", names)
    def check(name):
        found, forward, plain, held = passed(name, None)
        again, _, most, least = passed(name, nothing)
        kept, first, formed, between = passed(name, dear)
        assert_same(again, found)
        assert_same(kept, found)
        assert first == forward
        assert formed == plain, "products that were kept are formed again"
        assert least <= between
        assert least < held
        if forward:  # on a CPU some recipes form theirs by kernels of their own, which no policy sees
            assert plain < most <= plain + forward  # torch stops as soon as it has what the backward pass needs
            assert least < between

    check()


@pytest.mark.parametrize("names", fast_and_every(EVERY, STATES))
def test_a_policy_may_keep_everything(names):
    @for_each("name", names)
    def check(name):
        setups = [prepared(name, Selected(name, policy)) for policy in (None, everything)]
        assert train(*setups[0], 2) == train(*setups[1], 2)
        assert_same(*[[copied(each.state_dict()) for each in setup] for setup in setups])

    check()
