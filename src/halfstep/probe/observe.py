"""See every tensor of a forward and a backward pass: inputs, outputs, products inside a module, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.probe.ranges import Site
from halfstep.tracking.nonfinite import tensors_in


See = Callable[[Site, Tensor], None]

_aten = torch.ops.aten
_PRODUCTS = {_aten.bmm.default, _aten.baddbmm.default, _aten.mm.default, _aten.addmm.default}
_FUSED = {
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(_aten, name)
}
_SHOWN = (nn.Linear, nn.modules.conv._ConvNd)  # their product is their output
_CHUNK = 1 << 22  # values of attention logits that are formed at a time


@contextmanager
def observed(model: nn.Module, see: See) -> Iterator[None]:
    """While active, `see(site, tensor)` is called with every floating tensor of a pass, as it is made.

    These are what goes into and comes out of each module, the matrix products that a module's own code forms, the
    logits of fused attention (formed again from queries and keys, in their dtype), and the gradients of all of these
    as the backward makes them. Nothing stays on the model. Inputs by keyword count where they carry a gradient: the
    others are masks and positions.
    """
    eyes = _Eyes(model, see)
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(eyes.before(path), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(eyes.after(path), always_call=True))
        hooks.enter_context(_Inside(eyes))
        yield


class _Eyes:
    """Which module is running, and what to look at when a gradient arrives."""

    def __init__(self, model: nn.Module, see: See) -> None:
        self.see = see
        self._kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        self._shown = {path for path, module in model.named_modules() if isinstance(module, _SHOWN)}
        self._running: list[str] = []
        self._arrived: str | None = None
        """In the backward: the module whose gradient arrived last."""
        self._waiting: Any = WeakIdKeyDictionary()

    def before(self, path: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._running.append(path)
            for tensor in [*tensors_in(args), *(t for t in tensors_in(kwargs) if t.requires_grad)]:
                self._look(path, "input", tensor)

        return look

    def after(self, path: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()
            for tensor in tensors_in(output):
                self._look(path, "output", tensor)

        return look

    def inside(self) -> tuple[str, bool] | None:
        """The module whose code forms a product now, and whether in the backward; None where it is shown anyway."""
        path = self._running[-1] if self._running else self._arrived
        return None if path is None or path in self._shown else (path, not self._running)

    def site(self, path: str, role: str, backward: bool) -> Site:
        return Site(path, self._kinds[path], f"gradient of the {role}" if backward else role, backward)

    def _look(self, path: str, role: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point():
            return
        self.see(self.site(path, role, False), tensor)
        if not tensor.requires_grad or tensor.is_leaf or tensor.dim() == 0:  # a loss is a float32 number
            return
        version, sites = self._waiting.get(tensor, (None, []))
        if version != tensor._version:  # else its gradient is already waited for, on behalf of another module
            sites = []
            self._waiting[tensor] = tensor._version, sites
            tensor.register_hook(lambda grad: self._arrive(sites, grad))  # type: ignore[no-untyped-call]
        sites.append((path, role))

    def _arrive(self, sites: list[tuple[str, str]], grad: Tensor) -> None:
        made = [path for path, role in sites if role == "output"]
        self._arrived = made[0] if made else sites[0][0].rpartition(".")[0]
        for path, role in reversed(sites):  # who took the tensor made its gradient: they come first
            self.see(self.site(path, role, True), grad)


class _Inside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the products that functional code forms. It reads, and hands on what the operator returned."""

    def __init__(self, eyes: _Eyes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eyes = eyes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS or func in _FUSED:
            place = self._eyes.inside()
            if place is not None and func in _PRODUCTS and result.is_floating_point():
                self._eyes.see(self._eyes.site(place[0], "product", place[1]), result)
            elif place is not None and func in _FUSED:
                site = self._eyes.site(place[0], "attention logits", False)
                for logits in _logits(args[0], args[1], (kwargs or {}).get("scale")):
                    self._eyes.see(site, logits)
        return result


def _logits(query: Tensor, key: Tensor, scale: float | None) -> Iterator[Tensor]:
    """q k^T times scale (1 / sqrt(width) if None), a piece at a time, formed in float32 and rounded to q's dtype.

    query is (batch, heads, length, width), key alike with as many heads or fewer; before any mask.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    queries, keys = query.detach().flatten(0, -3), key.detach().flatten(0, -3)
    step = max(1, _CHUNK // max(1, queries.shape[-2] * keys.shape[-2]))
    for start in range(0, len(queries), step):
        q, k = queries[start : start + step].float(), keys[start : start + step].float()
        yield (torch.bmm(q, k.transpose(-1, -2)) * scale).to(query.dtype)
