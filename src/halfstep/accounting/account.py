"""The bytes of training by a recipe, and of inference, by role: of a run on tensors without memory.

What one of several devices holds of them has for each role a divisor of its own; the largest batch that fits there.
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
"""Optimizers by name; `sgd` has no momentum, and `momentum` is SGD with one."""


@dataclass(frozen=True)
class Account:
    """The bytes of one recipe on one device that holds everything."""

    recipe: str
    parameters: int
    """How many there are; tied ones count once."""
    trained: int
    """How many of them have a gradient."""
    bytes: StepBytes
    passes: bool
    """Whether a pass was run: where not, activations are unknown, and count nothing."""
    across: Communication | None = None
    """In which formats gradients and sharded weights cross from device to device; None: as they are stored."""

    @property
    def per_parameter(self) -> float:
        """Persistent bytes a parameter."""
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
    """Build the model without memory, have it follow the recipe, run a forward and a backward pass, and count.

    Args:
        recipe: a name, a file, or a `Recipe`: one's own too.
        batch, sequence: examples, and tokens in each (None: the subject's usual number).
        optimizer: a key of `OPTIMIZERS`.
        checkpointing: a key of `checkpointing.CHECKPOINTING`.
        per_layer: the optimizer steps within the backward pass, and each gradient is dropped when it has arrived.

    Of a recipe with stages it is the account of the stage that holds the most at once: what such a run takes.

    Raises:
        AccountError: an unknown optimizer or checkpointing; a longer sequence than the model has positions for; a
            recipe that keeps linear layers otherwise, of a checkpoint.
        RecipeError, ModelError, OptimizerError: as `halfstep.prepare`; a model that cannot be run without values.
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
    # Steps within the pass come while activations are there: at most so much on top.
    found = replace(found, update=update, peak=found.peak + (update if per_layer else 0))
    counts = sum(p.numel() for p in parameters), sum(p.numel() for p in trained)
    return Account(recipe.name, *counts, found, subject.batch is not None, crossing(recipe))


def crossing(recipe: Recipe) -> Communication | None:
    """In which formats gradients and weights cross: as the recipe says. Gradients that are kept as codes are not, where
    several devices train."""
    across = recipe.communication
    if across is not None and across.weights == OPERANDS and not any(shared(rule.linear) for rule in recipe.rules):
        across = None if across.gradients is None else replace(across, weights=None)
    if recipe.codes is None or recipe.codes.grads is None or (across is not None and across.gradients is not None):
        return across
    return Communication(get_storage("fp32"), across.weights if across is not None else None)


def _without_layers(subject: Subject, recipe: Recipe) -> Recipe:
    """What a recipe keeps of parameters alone, whose layers are not known: rounded products keep nothing."""
    if recipe.codes is not None or recipe.projection is not None:
        raise AccountError(
            f"{subject.name} does not say which of its matrices are linear layers', and recipe {recipe.name!r} keeps "
            "those otherwise than others; give the model's config.json or its folder, or module:function"
        )
    return replace(recipe, rules=(), attention=None, smooth_glu=None, saved=None)


@dataclass(frozen=True)
class InferenceBytes:
    """Bytes by role on one device, whole numbers."""

    weights: int
    scales: int
    buffers: int
    kv_cache: int
    """Keys and values of all tokens of all examples; 0 for a model that keeps none."""
    peak: int
    """The most held at once while all of the tokens are read in one pass."""

    @property
    def persistent(self) -> int:
        """What is there between two tokens."""
        return self.weights + self.scales + self.buffers + self.kv_cache


def inference(subject: Subject, recipe: str | Recipe, *, batch: int = 1, sequence: int | None = None) -> InferenceBytes:
    """Build the model without memory, have it follow the recipe, read a batch of tokens, and count what it keeps.

    The cache is that of a Hugging Face model (`use_cache`).

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
    """The keys and values of a Hugging Face cache, whose layers hold them."""
    found = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def checkpointed(model: nn.Module, how: str) -> nn.Module:
    """The model with checkpoints. Blocks are those of the list of alike modules that has the most parameters.

    Args:
        how: `none`; `selective`: scaled dot-product attention is computed again; `full`: each block is, from its input.

    Raises:
        AccountError: no such way; or the model has no blocks.
    """
    return CHECKPOINTING[one_of("checkpointing", how, CHECKPOINTING, AccountError)](model)


def _full(model: nn.Module) -> nn.Module:
    for block in _blocks(model):
        block.forward = _again(block.forward)
    return model


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
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
            f"{type(model).__name__} has no list of alike blocks (torch.nn.ModuleList or Sequential) to compute again; "
            "account for it without checkpointing"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


class _AttentionAgain(TorchFunctionMode):
    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.found = True
            return _again(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _selective(model: nn.Module) -> nn.Module:
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with _AttentionAgain() as attention:
            output = forward(*args, **kwargs)
        if not attention.found:
            raise AccountError(
                f"{type(model).__name__} calls no torch.nn.functional.scaled_dot_product_attention to compute again; "
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
"""Elements of the buckets that gradients are reduced and weights gathered in. Source: DeepSpeed's defaults of
`reduce_bucket_size` and `allgather_bucket_size`."""


@dataclass(frozen=True)
class Share:
    """Bytes by role on one device, whole numbers; parts of a tensor are rounded up."""

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
    """What the optimizer makes for itself while it steps: of whole matrices, over how many devices they may lie."""
    sent: int
    """What it sends to others in a step."""
    peak: int
    """The most at once, from the first operation of the forward pass to the end of the optimizer's step."""

    @property
    def persistent(self) -> int:
        """What is there between the backward pass and the step."""
        return sum((
            self.weights, self.buffers, self.gradients, self.scales, self.master, self.states, self.communication
        ))  # fmt: skip


def check_ranks(ranks: int, zero: int) -> None:
    """Refuse what `share` cannot divide by.

    Raises:
        AccountError: no such stage; fewer than one device; a stage with one device, which has none to share with.
    """
    if zero not in range(4):
        raise AccountError(f"--zero {zero} given; expected a stage from 0 to 3")
    if ranks < 1:
        raise AccountError(f"--dp {ranks} given; expected a number of devices, at least 1")
    if zero and ranks == 1:
        raise AccountError(f"--zero {zero} shards over devices, and there is one: say over how many, such as --dp 8")


def share(account: Account, ranks: int = 1, zero: int = 0) -> Share:
    """What each of `ranks` devices holds that train on batches of their own.

    Stage 0 copies everything; 1 shards masters and states, 2 gradients too, 3 weights too (ZeRO). Communication is what
    gradients are reduced in: at stage 0 a copy of them (torch's DDP without `gradient_as_bucket_view`); from stage 1 on
    buckets of `BUCKET` elements, for gradients and for weights that are gathered. Error feedback keeps four bytes more
    of each parameter that is trained.

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
    """The bytes that one of the devices sends to others in a step, scales included, by ring or pairwise collectives.

    Gradients are scattered and gathered at stage 0; from stage 1 on they are scattered, and weights are gathered: once,
    at stage 3 for the forward and for the backward pass.
    """
    across, gradients, weights = account.across, account.bytes.gradients, account.bytes.weights
    if across is not None and across.gradients is not None:
        gradients = round(account.trained * across.gradients.bytes)
    if across is not None and across.weights is not None:
        weights = round(account.parameters * _bytes(across.weights))
    return -(-int(_crossings(gradients, weights, zero)) * (ranks - 1) // ranks)


def sent_a_parameter(recipe: Recipe, zero: int) -> float:
    """The bytes of a parameter that one of N devices sends in a step, times N / (N - 1)."""
    across, size = crossing(recipe), recipe.bytes_per_parameter()
    gradients = across.gradients.bytes if across is not None and across.gradients is not None else size.grads
    weights = _bytes(across.weights) if across is not None and across.weights is not None else size.weights
    return _crossings(gradients, weights, zero)


def _bytes(weights: Storage | str) -> float:
    return weights.bytes if isinstance(weights, Storage) else 1.0  # codes of 8 bits, with scales of whole tensors


def _crossings(gradients: float, weights: float, zero: int) -> float:
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
    """The bytes of a size with its unit.

    Raises:
        AccountError: there is no number, or no unit: 80 GB are 74.5 GiB.

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
    """The largest batch whose peak is at most `memory`, and that peak; (0, peak of a batch of 1) where not even one
    fits.

    The peak grows by as much with every example, but for what is rounded up; so it is guessed by a line through two
    batches and then counted, until a batch fits and the next does not.

    Args:
        peak_of: the peak of a batch, counted again.
        known: a batch and its peak.
    """
    peaks = dict([known])

    def peak(batch: int) -> int:
        if batch not in peaks:
            peaks[batch] = peak_of(batch)
        return peaks[batch]

    low, high, guess = 0, 0, 1  # fits, and does not; 0 is none yet
    while True:
        low, high = (guess, high) if peak(guess) <= memory else (low, guess)
        if high == low + 1:
            return (low, peak(low)) if low else (0, peak(1))
        guess = _next(peaks, low, high, memory)


def _next(peaks: dict[int, int], low: int, high: int, memory: int) -> int:
    """The batch to try next: where a line through what is known meets the memory, within what is open."""
    first, *_, last = sorted(peaks) if len(peaks) > 1 else (1, 1)
    slope = (peaks[last] - peaks[first]) / (last - first) if last > first else 0.0
    near = min(peaks, key=lambda batch: abs(peaks[batch] - memory))
    guess = near + int((memory - peaks[near]) // slope) if slope > 0 else 2 * max(low, 1)
    return max(low + 1, min(guess, high - 1)) if high else max(low + 1, guess)
