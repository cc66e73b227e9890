"""`Arrangement`: what a recipe, or one stage of it, does to a model's modules; decided first, then carried out."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from halfstep import ops
from halfstep.kernels import carried
from halfstep.nn.adapters import attention, gated, linear, nonlinear, recurrent, wide
from halfstep.nn.adopt import Forward, adopt, forward_owner, owner_of
from halfstep.nn.layers import Matched, ModuleFilter, match
from halfstep.nn.paths import is_in
from halfstep.nn.quantized_weights import Weight
from halfstep.nn.scaling import attach
from halfstep.ops.part import own_part
from halfstep.recipe import DTYPES, LinearSpec, Recipe, Saved
from halfstep.unit import multipliers_of


_WIDENING = {owner_of(owner): forward for owner, forward in wide.FORWARDS.items()}
"""Forwards that replace those of torch that refuse operands of two dtypes, by the class that defines the forward."""
_ENCODERS = frozenset(map(owner_of, attention.ENCODERS))
_LSTM, _LINEAR = owner_of(nn.LSTM), owner_of(nn.Linear)


@dataclass(frozen=True)
class Arrangement:
    """The changes that a recipe without stages makes to a model's modules, by path."""

    recipe: Recipe
    matched: Matched
    widened: dict[str, nn.Module]
    """The modules that compute in float32."""
    specs: dict[str, LinearSpec]
    """The specs of the layers that round."""
    weights: dict[str, tuple[Weight, ...]]
    """The weights of those layers."""
    savers: "Savers"
    """The modules whose saved tensors are stored in few bits."""

    @property
    def rounded(self) -> dict[str, Weight]:
        """The weights that matmuls round, by name."""
        return {
            f"{path}.{weight.name}".lstrip("."): weight for path, weights in self.weights.items() for weight in weights
        }

    @property
    def keeps_states(self) -> bool:
        """Whether any scale depends on earlier steps."""
        return any(spec.states for spec in self.specs.values())

    @property
    def draws(self) -> set[str]:
        """The paths of the modules that draw noise or signs."""
        attention = self.recipe.attention is not None and self.recipe.attention.draws
        return {path for path, spec in self.specs.items() if spec.draws} | {*self.matched.attends * attention}

    def carry_out(self, model: nn.Module) -> None:
        """Give every module its forward, attributes and scaling states."""
        self._adopt_layers(model)
        if self.recipe.saved is not None:
            adopt_savers(model, self.recipe.saved, self.savers)
        products = {path: [weight.product for weight in weights] for path, weights in self.weights.items()}
        attach(model, self.specs, products)

    def _adopt_layers(self, model: nn.Module) -> None:
        """Adopt every layer that computes otherwise than torch does."""
        recipe, matched, specs, mixed = self.recipe, self.matched, self.specs, self.recipe.compute != "fp32"
        carries = carried.supports(DTYPES[recipe.compute], next(model.parameters()).device)
        around = {path.rpartition(".")[0] for path in specs}  # an attention module computes its out_proj's matmul
        unfused = attention.ENCODERS if specs else (attention.NESTS,) if mixed and recipe.weights == "fp32" else ()
        for path, module in model.named_modules():
            owner = forward_owner(module)
            if recipe.weights != "fp32":
                if owner in _WIDENING:
                    adopt(module, _WIDENING[owner])
                if wide.has_own_code(module):
                    adopt(module, wide.own_code)
                wide.widen_hooked(module)
            if path in self.widened:
                adopt(module, wide.forward)
            elif path in matched.kinds and (carries or path in specs or path in around or path in matched.attends):
                own_part(module).linear = (specs.get(path) or LinearSpec()).times(multipliers_of(module))
                adopt(module, matched.kinds[path].forward)
            elif owner == _LINEAR and recipe.autocast is not None:
                adopt(module, linear.under_autocast)
            if isinstance(module, unfused) and owner in _ENCODERS:
                adopt(module, attention.encoder_forward)
            if mixed and owner == _LSTM and path not in self.widened and path not in specs:
                adopt(module, recurrent.lstm_forward)
            if path in matched.attends:
                own_part(module).attention = recipe.attention
            if path in matched.smoothed:
                adopt(module, gated.FORWARDS[str(recipe.smooth_glu)])


def arranged(model: nn.Module, recipe: Recipe, module_filter: ModuleFilter | None) -> Arrangement:
    """The arrangement of a recipe without stages for a model, which is not changed.

    Raises:
        RecipeError, ModelError: as `layers.match`.
    """
    matched = match(model, recipe, module_filter)
    widened = wide.find(model, recipe.float32_modules)
    specs = {path: spec for path, spec in matched.specs.items() if not any(is_in(path, place) for place in widened)}
    weights = {path: matched.kinds[path].weights(model.get_submodule(path)) for path in specs}
    savers = {} if recipe.saved is None else find(model, recipe.saved, specs, matched.smoothed)
    return Arrangement(recipe, matched, widened, specs, weights, savers)


Savers = Mapping[str, Forward | None]
"""By path, a forward that saves tensors for backward in few bits; None if the module's adopted forward does it."""


def find(
    model: nn.Module, saved: Saved, specs: Mapping[str, LinearSpec], smoothed: Collection[str]
) -> dict[str, Forward | None]:
    """The savers of a model that is not adopted yet.

    Args:
        specs: the specs of the layers that round.
        smoothed: the paths of the gated MLPs that will be smoothed.
    """
    found: dict[str, Forward | None] = {}
    for path, module in model.named_modules():
        if path in specs:
            if saved.operands and specs[path].input_codes is not None:
                found[path] = None
        elif saved.nonlinear is not None and nonlinear.fits(module):
            found[path] = nonlinear.forward
        elif saved.nonlinear is not None and gated.resembles(module) and gated.refusal(module) is None:
            found[path] = None if path in smoothed else gated.kept
    return found


def adopt_savers(model: nn.Module, saved: Saved, savers: Savers) -> None:
    """Adopt the savers and give them one `SavedCodes`, so that a tensor that two modules save is encoded once."""
    saved_codes = ops.SavedCodes(saved)
    for path, forward in savers.items():
        module = model.get_submodule(path)
        own_part(module).saved_codes = saved_codes
        if forward is not None:
            adopt(module, forward)
