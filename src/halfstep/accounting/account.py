"""Bytes by role of training under a recipe, and of inference, counted in a run on FakeTensors.

Also each device's share of them under data parallelism (ZeRO), and the largest batch that fits a device.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from halfstep.accounting.subject import Subject, blank, loss_of, sequence_of
from halfstep.distributed.sharded import shared
from halfstep.errors import AccountError, one_of
from halfstep.memory import Live, StepBytes, measure_persistent, measure_step, measure_update, parts_of
from halfstep.nn import apply
from halfstep.optim import Lamb, Lion
from halfstep.preparation import prepare
from halfstep.recipe import OPERANDS, Communication, Recipe, Storage, get_recipe, get_storage


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lion": Lion,
    "lamb": Lamb,
}
"""Optimizers by name; `sgd` has no momentum, and `momentum` is SGD with momentum."""


@dataclass(frozen=True)
class Account:
    """The bytes of training under one recipe on one device that holds everything."""

    recipe: str
    parameters: int
    """The number of parameter elements; tied parameters count once."""
    trained: int
    """The number of parameter elements that require a gradient."""
    bytes: StepBytes
    passes: bool
    """Whether a pass was run. If not, activations are unknown and counted as 0."""
    across: Communication | None = None
    """The formats in which gradients and sharded weights are sent between devices; None: as they are stored."""

    @property
    def per_parameter(self) -> float:
        """Persistent bytes per parameter."""
        return self.bytes.persistent / self.parameters


def account(
    subject: Subject,
    recipe: str | Recipe,
    *,
    batch: int = 1,
    sequence: int | None = None,
    optimizer: str = "adamw",
    checkpointing: str = "none",
    per_layer: bool = False,
) -> Account:
    """Build the model on FakeTensors, prepare it with the recipe, run a forward and a backward pass, and count bytes.

    For a recipe with stages, the account of the stage with the highest peak.

    Args:
        recipe: a name, a file, or a `Recipe`.
        batch, sequence: the number of examples, and of tokens in each (None: the subject's default).
        optimizer: a key of `OPTIMIZERS`.
        checkpointing: a key of `CHECKPOINTING`.
        per_layer: the optimizer steps within the backward pass, which drops each gradient once it is accumulated.

    Raises:
        AccountError: an unknown optimizer or checkpointing; a longer sequence than the model has positions for; for a
            checkpoint, a recipe that stores linear layers unlike other parameters.
        RecipeError, ModelError, OptimizerError: as `halfstep.prepare`; a model that cannot run on FakeTensors.
    """
    recipe = get_recipe(recipe)
    one_of("optimizer", optimizer, OPTIMIZERS, AccountError)
    length = sequence_of(subject, sequence)
    if recipe.stages:
        options: dict[str, Any] = {"batch": batch, "sequence": sequence, "optimizer": optimizer}
        options |= {"checkpointing": checkpointing, "per_layer": per_layer}
        each = [account(subject, stage, **options) for stage in recipe.by_stage]
        most = max(each, key=lambda account: max(account.bytes.peak, account.bytes.persistent + account.bytes.update))
        return replace(most, recipe=recipe.name)
    if not subject.has_layers:
        recipe = _without_layers(subject, recipe)
    with blank(subject):
        model = subject.build()
        wrapped = checkpointed(model, checkpointing) if subject.batch is not None else model
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        model, low_bit, scaler = prepare(wrapped, OPTIMIZERS[optimizer](trained), recipe, generator=0)
        if subject.batch is None:
            found = measure_persistent(model, low_bit, per_layer)
        else:
            data = subject.batch(model, batch, length)
            found = measure_step(
                model, low_bit, lambda: loss_of(data.call(model), data), data.tensors, scaler.scale, per_layer
            )
        update = measure_update(model, low_bit)
    # Steps within backward run while activations are live: the peak grows by at most the step's temporary bytes.
    found = replace(found, update=update, peak=found.peak + (update if per_layer else 0))
    counts = sum(p.numel() for p in parameters), sum(p.numel() for p in trained)
    return Account(recipe.name, *counts, found, subject.batch is not None, sent_formats(recipe))


def sent_formats(recipe: Recipe) -> Communication | None:
    """The formats in which a recipe's gradients and sharded weights are sent between devices; None: as stored.

    `OPERANDS` is dropped if no rule's matmuls share the weight's quantizer. Gradients that the recipe stores as codes
    on one device are float32 on several, unless it has a format for sending them."""
    across = recipe.communication
    if across is not None and across.weights == OPERANDS and not any(shared(rule.linear) for rule in recipe.rules):
        across = None if across.gradients is None else replace(across, weights=None)
    if recipe.codes is None or recipe.codes.grads is None or (across is not None and across.gradients is not None):
        return across
    return Communication(get_storage("fp32"), across.weights if across is not None else None)


def _without_layers(subject: Subject, recipe: Recipe) -> Recipe:
    """The recipe without rules for layers, for a checkpoint whose layers are unknown: quantized matmuls store nothing
    that persists."""
    if recipe.codes is not None or recipe.projection is not None:
        raise AccountError(
            f"{subject.name} does not say which of its matrices are linear layers, and recipe {recipe.name!r} stores "
            "those differently from others; give the model's config.json or its folder, or module:function"
        )
    return replace(recipe, rules=(), attention=None, smooth_glu=None, saved=None)


@dataclass(frozen=True)
class InferenceBytes:
    """The bytes of inference by role, on one device."""

    weights: int
    scales: int
    buffers: int
    kv_cache: int
    """Keys and values of all tokens of all examples; 0 for a model without a cache."""
    peak: int
    """The peak of a forward pass over all tokens at once (prefill)."""

    @property
    def persistent(self) -> int:
        """The bytes between two tokens: weights, scales, buffers and the KV cache."""
        return self.weights + self.scales + self.buffers + self.kv_cache


def inference(subject: Subject, recipe: str | Recipe, *, batch: int = 1, sequence: int | None = None) -> InferenceBytes:
    """Build the model on FakeTensors, apply the recipe, run one forward pass, and count the bytes of inference.

    The KV cache is that of Hugging Face models (`use_cache`).

    Raises:
        AccountError: a checkpoint, which cannot run; a recipe with stages; as `account`.
        RecipeError, ModelError: as `halfstep.apply`.
    """
    recipe = get_recipe(recipe)
    if recipe.stages:
        raise AccountError(
            f"recipe {recipe.name!r} has stages, and inference has none: ask for one of them, such as "
            f"{recipe.by_stage[-1].name!r}"
        )
    if subject.batch is None:
        raise AccountError(f"{subject.name}: a checkpoint alone cannot be run; give its config.json, or its folder")
    length = sequence_of(subject, sequence)
    with blank(subject), torch.no_grad():
        model = subject.build().eval()
        apply(model, recipe)
        data = subject.batch(model, batch, length).without("labels")
        caches = hasattr(getattr(model, "config", None), "use_cache")
        with Live() as live:
            live.give("weights", model.parameters())
            live.give("buffers", model.buffers())
            output = data.call(model, **({"use_cache": True} if caches else {}))
            kept = getattr(output, "past_key_values", None)
            del output
            live.give("cache", _tensors(kept))
    scales = [part for p in model.parameters() for name, part in parts_of(p).items() if name not in ("", "codes")]
    beside = sum(part.untyped_storage().nbytes() for part in scales)
    weights, buffers, cache = (live.bytes_of(role) for role in ("weights", "buffers", "cache"))
    return InferenceBytes(weights - beside, beside, buffers, cache, live.peak.total())


def _tensors(cache: Any) -> list[torch.Tensor]:
    """The keys and values of all layers of a Hugging Face cache."""
    found = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def checkpointed(model: nn.Module, how: str) -> nn.Module:
    """Add activation checkpointing to a model in place, and return it.

    Args:
        how: `none`; `selective`: recompute scaled dot-product attention; `full`: recompute each block from its input.
            Blocks are the modules of the ModuleList or Sequential of equal types that has the most parameters.

    Raises:
        AccountError: an unknown `how`; or the model has no blocks.
    """
    return CHECKPOINTING[one_of("checkpointing", how, CHECKPOINTING, AccountError)](model)


def _full(model: nn.Module) -> nn.Module:
    for block in _blocks(model):
        block.forward = _recomputed(block.forward)
    return model


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        [*found]
        for found in model.modules()
        if isinstance(found, (nn.ModuleList, nn.Sequential))
        and len({type(part) for part in found}) == 1
        and any(True for _ in found[0].children())
    ]
    if not lists:
        raise AccountError(
            f"{type(model).__name__} has no torch.nn.ModuleList or Sequential of blocks of one type to recompute; "
            "account for it without checkpointing"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


class _RecomputedAttention(TorchFunctionMode):
    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.found = True
            return _recomputed(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _selective(model: nn.Module) -> nn.Module:
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with _RecomputedAttention() as attention:
            output = forward(*args, **kwargs)
        if not attention.found:
            raise AccountError(
                f"{type(model).__name__} calls no torch.nn.functional.scaled_dot_product_attention to recompute; "
                "account for it with full checkpointing, or without"
            )
        return output

    model.forward = watched
    return model


CHECKPOINTING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "selective": _selective,
    "full": _full,
}
"""Ways of checkpointing, by name."""


BUCKET = 500_000_000
"""The elements of a bucket in which gradients are reduced or weights gathered. Source: DeepSpeed's defaults of
`reduce_bucket_size` and `allgather_bucket_size`."""


@dataclass(frozen=True)
class Share:
    """The bytes by role on one of several devices; a role's shard is rounded up to whole bytes."""

    weights: int
    buffers: int
    gradients: int
    master: int
    states: int
    scales: int
    communication: int
    compute_copies: int
    activations: int
    update: int
    """Temporary bytes of the optimizer's step. Not divided by the devices: they are for whole matrices."""
    sent: int
    """The bytes that the device sends to others in a step."""
    peak: int
    """The largest sum at any time from the start of the forward pass to the end of the optimizer's step."""

    @property
    def persistent(self) -> int:
        """The bytes between backward and step: all but compute copies, activations and the step's temporary bytes."""
        return sum((
            self.weights, self.buffers, self.gradients, self.scales, self.master, self.states, self.communication
        ))  # fmt: skip


def check_ranks(ranks: int, zero: int) -> None:
    """Check the number of devices and the ZeRO stage of `share`.

    Raises:
        AccountError: an unknown stage; fewer than one device; a stage above 0 with one device.
    """
    if zero not in range(4):
        raise AccountError(f"--zero {zero} given; expected a stage from 0 to 3")
    if ranks < 1:
        raise AccountError(f"--dp {ranks} given; expected a number of devices, at least 1")
    if zero and ranks == 1:
        raise AccountError(f"--zero {zero} shards over devices, and there is one: say over how many, such as --dp 8")


def share(account: Account, ranks: int = 1, zero: int = 0) -> Share:
    """The bytes of each of `ranks` devices under data parallelism; `account` has one device's batch.

    `zero` is the ZeRO stage: 0 copies everything to each device; 1 shards master weights and states, 2 gradients too, 3
    weights too. Communication buffers are a copy of the gradients at stage 0 (torch's DDP without
    `gradient_as_bucket_view`), and from stage 1 on one bucket of `BUCKET` elements for gradients and one for gathered
    weights. Error feedback adds four bytes for each trained parameter.

    Raises:
        AccountError: as `check_ranks`.

    Source: Rajbhandari et al. 2020, arXiv 1910.02054, figure 1 and section 5.
    """
    check_ranks(ranks, zero)
    held = account.bytes
    of_weights, of_gradients, of_states = (ranks if zero >= stage else 1 for stage in (3, 2, 1))

    def divided(size: int, divisor: int) -> int:
        return -(-size // divisor)

    weights, scales = divided(held.weights, of_weights), divided(held.scales, of_weights)
    master, states = divided(held.master, of_states), divided(held.states, of_states)
    state_scales = divided(held.state_scales, of_states)
    communication = _communication(account, ranks, zero)
    fixed = held.weights + held.buffers + held.scales + held.master + held.states + held.state_scales
    passing = max(0, held.peak - held.peak_gradients - fixed)
    kept = weights + held.buffers + scales + master + states + state_scales + communication
    gradients = divided(held.gradients, of_gradients)
    peak = max(kept + divided(held.peak_gradients, of_gradients) + passing, kept + gradients + held.update)
    return Share(
        weights, held.buffers, gradients, master, states, scales + state_scales, communication, held.compute_copies,
        held.activations, held.update, sent_by(account, ranks, zero), peak,
    )  # fmt: skip


def sent_by(account: Account, ranks: int, zero: int) -> int:
    """The bytes that one device sends to others in a step, scales included, by ring or pairwise collectives.

    At ZeRO stage 0 gradients are reduce-scattered and all-gathered. From stage 1 on gradients are reduce-scattered and
    weights are all-gathered: once, and at stage 3 twice, for the forward and the backward pass.
    """
    across, gradients, weights = account.across, account.bytes.gradients, account.bytes.weights
    if across is not None and across.gradients is not None:
        gradients = round(account.trained * across.gradients.bytes)
    if across is not None and across.weights is not None:
        weights = round(account.parameters * _bytes(across.weights))
    return -(-int(_bytes_sent(gradients, weights, zero)) * (ranks - 1) // ranks)


def sent_a_parameter(recipe: Recipe, zero: int) -> float:
    """The bytes for each parameter that one of N devices sends in a step, times N / (N - 1)."""
    across, size = sent_formats(recipe), recipe.bytes_per_parameter()
    gradients = across.gradients.bytes if across is not None and across.gradients is not None else size.grads
    weights = _bytes(across.weights) if across is not None and across.weights is not None else size.weights
    return _bytes_sent(gradients, weights, zero)


def _bytes(weights: Storage | str) -> float:
    return weights.bytes if isinstance(weights, Storage) else 1.0  # 8-bit codes with one scale a tensor


def _bytes_sent(gradients: float, weights: float, zero: int) -> float:
    return 2 * gradients if zero == 0 else gradients + (2 if zero == 3 else 1) * weights


def _communication(account: Account, ranks: int, zero: int) -> int:
    if ranks == 1:
        return 0
    kept = 4 * account.trained if account.across is not None and account.across.feeds_back else 0
    if zero == 0:
        return account.bytes.gradients + kept
    reduced = account.bytes.gradients * min(account.trained, BUCKET) // max(1, account.trained)
    return reduced + account.bytes.weights * min(account.parameters, BUCKET) // account.parameters + kept


_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "TB": 10**12, "TiB": 2**40}


def bytes_from(text: str) -> int:
    """Parse a memory size with a unit to bytes.

    Raises:
        AccountError: no number, or no unit (required because 80 GB are 74.5 GiB).

    >>> bytes_from("80GB"), bytes_from("80 GiB")
    (80000000000, 85899345920)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise AccountError(
            f"memory of {text!r} given; expected a number and one of {', '.join(_UNITS)}, such as 80GB (1 GB is 10^9 "
            "bytes, 1 GiB 2^30)"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def largest(peak_of: Callable[[int], int], memory: int, known: tuple[int, int]) -> tuple[int, int]:
    """The largest batch whose peak is at most `memory`, and that peak; (0, peak of a batch of 1) if none fits.

    The peak is linear in the batch but for rounding. The search guesses the batch from a line through two known peaks
    and computes its peak, until a batch fits and the next larger one does not.

    Args:
        peak_of: computes the peak of a batch.
        known: a batch and its peak.
    """
    peaks = dict([known])

    def peak(batch: int) -> int:
        if batch not in peaks:
            peaks[batch] = peak_of(batch)
        return peaks[batch]

    low, high, guess = 0, 0, 1  # the largest batch that fits, the smallest that does not (0: none found yet)
    while True:
        low, high = (guess, high) if peak(guess) <= memory else (low, guess)
        if high == low + 1:
            return (low, peak(low)) if low else (0, peak(1))
        guess = _next(peaks, low, high, memory)


def _next(peaks: dict[int, int], low: int, high: int, memory: int) -> int:
    """The batch to try next, between `low` and `high`: where a line through the known peaks reaches `memory`."""
    first, *_, last = sorted(peaks) if len(peaks) > 1 else (1, 1)
    slope = (peaks[last] - peaks[first]) / (last - first) if last > first else 0.0
    near = min(peaks, key=lambda batch: abs(peaks[batch] - memory))
    guess = near + int((memory - peaks[near]) // slope) if slope > 0 else 2 * max(low, 1)
    return max(low + 1, min(guess, high - 1)) if high else max(low + 1, guess)
