"""The distance between the policy that is trained and the one that generates: two recipes, or other batch sizes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import DataError, ModelError, RecipeError
from halfstep.nn import apply
from halfstep.nn.layers import ModuleFilter
from halfstep.probe.batch import Batch, call, copied, described, unchanged_generators
from halfstep.recipe import Recipe, get_recipe
from halfstep.text import holding
from halfstep.tracking.nonfinite import outputs_seen


CLIP = 0.2
"""The usual clip of importance ratios: PPO's, TRL's and verl's default."""


@dataclass(frozen=True)
class Mismatch:
    """Two policies on the same tokens. `print(report)` shows it.

    With p the rollout's distribution of the next token and q the trainer's, in float64: KL is sum p (log p - log q),
    and a ratio is q(t) / p(t) for a token t drawn from p.
    """

    model: str
    train: str
    rollout: str
    tokens: int
    """Positions compared, each with a token drawn from the rollout's distribution."""
    kl: float
    kl_most: float
    difference: float
    """The mean of |log q(t) - log p(t)|."""
    difference_most: float
    ratio_least: float
    ratio_most: float
    clip: float
    clipped: float
    """The share of ratios outside [1 - clip, 1 + clip]."""
    layers: dict[str, float] = field(default_factory=dict)
    """The relative distance of each module's output from the trainer's, by its norm, on the first batch, in the order
    of the pass; empty if the rollout has other rows or padding."""

    @property
    def begins(self) -> str | None:
        """The first module whose output differs."""
        return next((path for path, apart in self.layers.items() if apart > 0), None)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {**asdict(self), "begins": self.begins}

    def __str__(self) -> str:
        begins, numbered = self.begins, (pair for pair in self.layers.items() if pair[0].rpartition(".")[2].isdecimal())
        blocks = ", ".join(f"{path} {apart:.2g}" for path, apart in numbered)
        said = {
            f"{self.model}: trained under {self.train}, generates under {self.rollout}; {self.tokens:,} tokens": True,
            f"KL of a token: {self.kl:.3g} on average, {self.kl_most:.3g} at most": True,
            f"|difference of log-probabilities|: {self.difference:.3g} on average, {self.difference_most:.3g} at "
            "most": True,
            f"importance ratios: {self.ratio_least:.4g} to {self.ratio_most:.4g}; {self.clipped:.2%} outside "
            f"[{1 - self.clip:g}, {1 + self.clip:g}]": True,
            "no module's output differs": self.layers and begins is None,
            f"begins at {begins} ({self.layers.get(begins or '', 0.0):.2g} of its output's norm)": begins is not None,
            f"by block: {blocks}": begins is not None and blocks,
        }
        return "\n".join(holding(said))


def mismatch(
    model: nn.Module,
    batches: Iterable[Batch],
    train: str | Recipe = "fp32",
    rollout: str | Recipe | nn.Module = "fp32",
    *,
    rows: int | None = None,
    padding: int = 0,
    clip: float = CLIP,
    module_filter: ModuleFilter | None = None,
    seed: int = 0,
) -> Mismatch:
    """Compare next-token distributions of a model under two recipes, in eval(), on the same tokens.

    The model is copied and not changed. To test batch invariance, pass one recipe twice and other `rows` or `padding`:
    then all figures are 0 if a row's results do not depend on its batch.

    Args:
        batches: tokens (rows, length), or mappings with `input_ids` (and `attention_mask`), as the model takes them.
        rollout: a recipe, or a model that generates unchanged, such as `halfstep.from_pretrained(folder)`.
        rows: the number of rows in each of the rollout's calls; None: the whole batch.
        padding: this many tokens (0) at the end of each of the rollout's rows, whose results are dropped.
        clip: ratios outside [1 - clip, 1 + clip] are counted.
        seed: of the drawn tokens.

    Raises:
        ModelError: the model returns no logits of (rows, length, vocabulary).
        DataError: there is no batch, or one without tokens.
        RecipeError: a recipe that is unknown, or fits no part of the model; invalid `rows` or `padding`.
    """
    if (rows is not None and rows < 1) or padding < 0 or not 0 < clip < 1:
        raise RecipeError(
            f"rows = {rows}, padding = {padding}, clip = {clip} given; expected at least 1 row a call (or None), a "
            "padding of at least 0, and a clip between 0 and 1"
        )
    found = list(batches)
    if not found:
        raise DataError("no batch given; expected tokens (rows, length), or mappings with input_ids")
    trained, train_name = _under(model, train, module_filter)
    served, served_name = (
        (rollout, type(rollout).__name__) if isinstance(rollout, nn.Module) else _under(model, rollout, module_filter)
    )
    was_training = served.training
    served.eval()
    beside = "" if rows is None else f", {rows} row{'s' * (rows > 1)} a call"
    beside += f", {padding} tokens of padding" if padding else ""
    sums, layers, device = _Sums(clip), _Layers(), next(trained.parameters()).device
    with torch.no_grad(), unchanged_generators(device):
        generator = torch.Generator(device).manual_seed(seed)
        for number, batch in enumerate(found):
            compares = number == 0 and rows is None and not padding
            with outputs_seen(_inside(trained, compares), layers.note):
                own = _logits(trained, batch)
            with outputs_seen(_inside(served, compares), layers.compare):
                other = _in_pieces(served, batch, rows, padding)
            sums.add(own, other, _kept(batch), generator)
    served.train(was_training)
    return Mismatch(type(model).__name__, train_name, served_name + beside, **sums.figures(), layers=layers.apart)


def _under(model: nn.Module, recipe: str | Recipe, module_filter: ModuleFilter | None) -> tuple[nn.Module, str]:
    """A copy that follows a recipe, in eval(), and the recipe's name."""
    known = get_recipe(recipe)
    own = copied(model)
    apply(own, known, module_filter=module_filter)
    return own.eval(), known.name


def _tokens(batch: Batch) -> Tensor:
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise DataError(f"a batch of {described(batch)} given; expected tokens (rows, length), or input_ids")
    return tokens


def _kept(batch: Batch) -> Tensor:
    """The positions that count: all but those masked by attention_mask."""
    tokens = _tokens(batch)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """(rows, length, vocabulary), without the loss that labels would cause."""
    tokens = _tokens(batch)
    given = {name: value for name, value in batch.items() if name != "labels"} if isinstance(batch, Mapping) else batch
    output = call(model, given)
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape or not logits.is_floating_point():
        what = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(
            f"{type(model).__name__} returned {what} for tokens of {tuple(tokens.shape)}; expected logits of every "
            "position, (rows, length, vocabulary): give a causal language model"
        )
    return logits.double()


def _in_pieces(model: nn.Module, batch: Batch, rows: int | None, padding: int) -> Tensor:
    tokens = _tokens(batch)
    count, length = tokens.shape

    def piece(value: Any, at: slice) -> Any:
        if not isinstance(value, Tensor) or value.shape[:1] != (count,):
            return value
        padded = nn.functional.pad(value, (0, padding)) if padding and value.shape[:2] == tokens.shape else value
        return padded[at]

    found = []
    for start in range(0, count, rows or count):
        at = slice(start, start + (rows or count))
        given = {k: piece(v, at) for k, v in batch.items()} if isinstance(batch, Mapping) else piece(batch, at)
        found.append(_logits(model, given)[:, :length])
    return torch.cat(found)


@dataclass(frozen=True)
class _Sums:
    """Sums of the figures over all tokens so far."""

    clip: float
    kl: list[Tensor] = field(default_factory=list)
    apart: list[Tensor] = field(default_factory=list)

    def add(self, own: Tensor, other: Tensor, kept: Tensor, generator: torch.Generator) -> None:
        """Add the logits of the trainer and of the rollout."""
        if own.shape != other.shape:
            raise ModelError(
                f"the trainer's logits are {tuple(own.shape)} and the rollout's {tuple(other.shape)}; expected two "
                "models of one vocabulary"
            )
        q, p = own[kept].log_softmax(-1), other[kept].to(own.device).log_softmax(-1)
        chances = p.exp()
        self.kl.append(torch.where(chances > 0, chances * (p - q), 0.0).sum(-1).clamp(min=0.0))
        self.apart.append((q - p).gather(-1, torch.multinomial(chances, 1, generator=generator)).squeeze(-1))

    def figures(self) -> dict[str, Any]:
        """The fields of a `Mismatch`."""
        kl, apart = torch.cat(self.kl), torch.cat(self.apart)
        if not kl.numel():
            raise DataError("attention_mask takes out every position of every batch; give tokens to compare")
        ratios = apart.exp()
        return {
            "tokens": kl.numel(),
            "kl": float(kl.mean()),
            "kl_most": float(kl.max()),
            "difference": float(apart.abs().mean()),
            "difference_most": float(apart.abs().max()),
            "ratio_least": float(ratios.min()),
            "ratio_most": float(ratios.max()),
            "clip": self.clip,
            "clipped": float(((ratios - 1).abs() > self.clip).double().mean()),
        }


@dataclass(frozen=True)
class _Layers:
    """The distance of each module's first output from that of the trainer's module of the same path, by its norm."""

    apart: dict[str, float] = field(default_factory=dict)
    seen: dict[str, list[Tensor]] = field(default_factory=dict)
    """The trainer's outputs that were not compared yet."""

    def note(self, path: str, outputs: list[Tensor]) -> None:
        """Record an output of the trainer."""
        if path not in self.seen:
            self.seen[path] = [tensor.clone() for tensor in outputs if tensor.is_floating_point()]

    def compare(self, path: str, outputs: list[Tensor]) -> None:
        """Compare an output of the rollout."""
        before, found = self.seen.get(path), [tensor for tensor in outputs if tensor.is_floating_point()]
        if before is not None and [t.shape for t in before] == [t.shape for t in found]:
            del self.seen[path]
            apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(before, found, strict=True))
            size = sum(float(a.double().square().sum()) for a in before)
            self.apart[path] = math.sqrt(apart / size) if size else float(apart > 0)


def _inside(model: nn.Module, wanted: bool) -> list[tuple[str, nn.Module]]:
    """The modules within a model by path, or none if not wanted."""
    return [(path, module) for path, module in model.named_modules() if path and wanted]
