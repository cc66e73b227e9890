"""Adapter of norms and activation functions whose inputs are saved for backward in few bits.

torch's LayerNorm, RMSNorm, GELU and SiLU, and those of Hugging Face's models, which have forwards of their own. ReLU is
left out: its gradient depends on which outputs are 0, and in few bits small ones would become 0.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.nn.adopt import stock_class
from halfstep.ops import saved_traced
from halfstep.ops.part import part_of
from halfstep.recipe import Storage
from halfstep.unit.roles import unit_part


def kept(module: nn.Module, x: Any) -> tuple[Storage | None, AbstractContextManager[Any]]:
    """(storage, context) for saving tensors of x's shape in few bits, if the recipe says so (`Saved.nonlinear`).

    In a traced graph, where no hooks run: the storage to round x by, else None. Outside of one: a context whose
    saved-tensor hooks do it.
    """
    saved_codes: ops.SavedCodes | None = part_of(module).saved_codes
    if saved_codes is None or saved_codes.saved.nonlinear is None or not isinstance(x, Tensor):
        return None, nullcontext()
    if not torch.compiler.is_compiling():
        return None, saved_codes.around(x)
    return saved_codes.saved.nonlinear if torch.is_grad_enabled() else None, nullcontext()


def fits(module: nn.Module) -> bool:
    """Whether the module is a norm or activation function that this adapter supports, by its class, or by its class's
    name and parameters."""
    if isinstance(module, torch.jit.ScriptModule) or next(module.children(), None) is not None:
        return False
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU)):
        return True
    name, parameters = type(module).__name__.lower(), [p for p in module.parameters() if p is not None]
    if name.endswith(("layernorm", "rmsnorm")):
        return all(p.dim() == 1 for p in parameters)
    return not parameters and any(word in name for word in ("gelu", "silu"))


def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward, with tensors saved in few bits. In a traced graph torch's own classes except RMSNorm get the
    same gradients; all others compute as stock modules do, as do unit-scaled norms, whose gradients have factors."""
    x: Any = args[0] if args else next(iter(kwargs.values()), None)
    storage, around = kept(module, x)
    if storage is not None and len(args) == 1 and not kwargs:
        return _traced(stock, module, x, storage)
    with around:
        return stock(module, *args, **kwargs)


def _traced(stock: Any, module: Any, x: Tensor, storage: Storage) -> Any:
    if not x.requires_grad:
        return stock(module, x)
    if isinstance(module, (nn.GELU, nn.SiLU)) and not getattr(module, "inplace", False):
        return saved_traced.elementwise(lambda x: stock(module, x), x, storage)
    plain = stock_class(module).forward is nn.LayerNorm.forward and unit_part(module).forward is None
    if plain and (module.weight is None or module.weight.dtype in (x.dtype, torch.float32)):
        shape = list(module.normalized_shape)
        return saved_traced.layer_norm(x, shape, module.weight, module.bias, module.eps, storage)
    return stock(module, x)
