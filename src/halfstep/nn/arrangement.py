"""What one recipe, or one stage of it, makes of a model's modules: decided first, applied afterwards."""

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
"""What stands in for forwards of torch's that refuse two dtypes, by the class whose forward it is."""
_ENCODERS = frozenset(map(owner_of, attention.ENCODERS))
_LSTM, _LINEAR = owner_of(nn.LSTM), owner_of(nn.Linear)


@dataclass(frozen=True)
class Arrangement:
    """A recipe without stages, and what it says of every module of a model, by path."""

    recipe: Recipe
    matched: Matched
    widened: dict[str, nn.Module]
    """The modules that compute in float32."""
    specs: dict[str, LinearSpec]
    """The layers that round."""
    weights: dict[str, tuple[Weight, ...]]
    """Their weights."""
    savers: "Savers"
    """The modules of which autograd keeps what it saves in few bits."""

    @property
    def rounded(self) -> dict[str, Weight]:
        """The weights that products round, by name."""
        return {
            f"{path}.{weight.name}".lstrip("."): weight for path, weights in self.weights.items() for weight in weights
        }

    @property
    def keeps_states(self) -> bool:
        """Whether any scale depends on earlier steps."""
        return any(spec.states for spec in self.specs.values())

    @property
    def draws(self) -> set[str]:
        """The modules that draw noise or signs, by path."""
        attention = self.recipe.attention is not None and self.recipe.attention.draws
        return {path for path, spec in self.specs.items() if spec.draws} | {*self.matched.attends * attention}

    def lay(self, model: nn.Module) -> None:
        """Give every module the forward, the attributes and the scaling states that it takes."""
        self._adopt_layers(model)
        if self.recipe.saved is not None:
            adopt_savers(model, self.recipe.saved, self.savers)
        products = {path: [weight.product for weight in weights] for path, weights in self.weights.items()}
        attach(model, self.specs, products)

    def _adopt_layers(self, model: nn.Module) -> None:
        """Give every layer that computes otherwise than torch's the forward that does."""
        recipe, matched, specs, mixed = self.recipe, self.matched, self.specs, self.recipe.compute != "fp32"
        carries = carried.supports(DTYPES[recipe.compute], next(model.parameters()).device)
        around = {path.rpartition(".")[0] for path in specs}  # an attention module forms the product of its out_proj
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
    """What a recipe without stages makes of a model, of which nothing is changed.

    Raises:
        RecipeError, ModelError: as `layers.match`; modules to be widened that are not there.
    """
    matched = match(model, recipe, module_filter)
    widened = wide.find(model, recipe.float32_modules)
    specs = {path: spec for path, spec in matched.specs.items() if not any(is_in(path, place) for place in widened)}
    weights = {path: matched.kinds[path].weights(model.get_submodule(path)) for path in specs}
    savers = {} if recipe.saved is None else find(model, recipe.saved, specs, matched.smoothed)
    return Arrangement(recipe, matched, widened, specs, weights, savers)


Savers = Mapping[str, Forward | None]
"""By path, the forward that keeps what a module saves in few bits; None where its own knows how."""


def find(
    model: nn.Module, saved: Saved, specs: Mapping[str, LinearSpec], smoothed: Collection[str]
) -> dict[str, Forward | None]:
    """The savers of a model of which nothing is adopted yet, whose layers follow these specs."""
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
    """Give them what they keep it by: one for all, so that two of them keep one tensor once."""
    keeping = ops.Keeping(saved)
    for path, forward in savers.items():
        module = model.get_submodule(path)
        own_part(module).keeping = keeping
        if forward is not None:
            adopt(module, forward)
