"""Write a trained, stock or quantised model for servers, with its weights rounded as in training."""

import copy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

import halfstep
from halfstep.errors import CheckpointError, LayoutError, ModelError, RecipeError, unknown
from halfstep.inspection.write import refuse_existing
from halfstep.layouts import Layout, fitting, get_layout, list_layouts
from halfstep.layouts.folder import check_new_folder, dtype_of
from halfstep.nn import quantize_model
from halfstep.nn.adopt import Applied
from halfstep.nn.pretrained import is_pretrained, write_pretrained
from halfstep.ops.part import part_of
from halfstep.recipe import Recipe, get_recipe, list_recipes
from halfstep.text import holding


GGUF = {
    "gguf-f32": "A GGUF file with matrices in float32: the values as they are.",
    "gguf-bf16": "A GGUF file with matrices in bfloat16.",
    "gguf-q8_0": "A GGUF file with matrices in int8 with a scale for 32 columns, rounded again by GGUF's own rule.",
    "gguf-mxfp4": "A GGUF file with the codes of MXFP4, and other matrices in bfloat16.",
}
"""Formats that llama.cpp loads, for Llama and GPT-2."""
_SHARD = "5GB"
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "chat_template*", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files that servers read besides weights and config.json: a tokenizer's files."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    format: str
    recipe: str
    """Empty if no recipe rounded anything."""
    nbytes: int
    """The bytes of all files."""
    quantized: tuple[str, ...]
    """The layers whose weights are codes."""
    kept: dict[str, str]
    """The layers that the recipe rounds but the file stores as rounded values, with the reason."""
    tokenizer: str = ""
    """For a GGUF file: llama.cpp's name of the tokenizer's kind, empty if it has none."""

    def __str__(self) -> str:
        how = f"as {self.recipe} rounds it" if self.recipe else "as it was"
        said = {
            f"{self.path}: {self.format}, {how}, {self.nbytes:,} bytes": True,
            f"  in codes: {len(self.quantized)} layers": self.quantized,
            **{f"  values, rounded: {path}: {why}": True for path, why in self.kept.items()},
            f"  tokenizer: {self.tokenizer}": self.tokenizer,
            "  no tokenizer: llama.cpp takes and gives token numbers": self.format in GGUF and not self.tokenizer,
        }
        return "\n".join(holding(said))


def export(
    model: torch.nn.Module,
    folder: str | Path,
    format: str | Layout | None = None,
    *,
    recipe: str | Recipe | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = _SHARD,
    tokenizer: str | Path | None = None,
) -> Exported:
    """Write a Hugging Face model as a folder that vLLM, SGLang and transformers load, or as a file for llama.cpp.

    Weights are rounded as in the recipe's forward matmuls, and written without another rounding: values in the file
    equal those of the last forward. The file's metadata names the recipe, the quantizers and this version;
    `halfstep.from_pretrained` reads it back. A layer that the format cannot hold is written as its rounded values, and
    named in the result. The model is not changed; unless `quantize_model` was called on it, a copy is made.

    Args:
        model: a transformers model: one that follows a recipe, one that `quantize_model` was called on, or a stock one.
        folder: a new folder; for GGUF a new file.
        format: a layout's name (`halfstep export --list`), or `gguf-f32`, `gguf-bf16`, `gguf-q8_0`, `gguf-mxfp4` (Llama
            and GPT-2); None is the layout that is closest to the recipe.
        recipe: for a stock model: the recipe by which its weights are rounded.
        dtype: of tensors that are not codes (`"bf16"`, `"fp16"`, `"fp32"`); None does not change it. Not for GGUF.
        max_shard_size: of one safetensors file. Not for GGUF.
        tokenizer: a folder whose tokenizer's files are copied too. In a GGUF file they become its tokenizer: GPT-2's or
            Llama 3's byte-level BPE, or Llama's BPE with byte fallback.

    Raises:
        LayoutError: an unknown format, one that does not hold the recipe's weights bit for bit, or one that does not
            support another argument.
        RecipeError: no recipe, or two; as `quantize_model`.
        ModelError: it is not a whole Hugging Face model; as `quantize_model`.
        CheckpointError: the folder exists and is not empty, the disk is full, or it cannot be written.
    """
    path, stored = Path(folder).expanduser(), dtype_of(dtype)
    check_format(format)
    (refuse_existing if format in GGUF else check_new_folder)(path)
    if not is_pretrained(model):
        raise ModelError(
            f"this {type(model).__name__} is not a Hugging Face model; servers load only these, by their config.json. "
            "Merge a PeftModel (merge_and_unload); of any other model call "
            "halfstep.quantize_model and save its state_dict()"
        )
    if isinstance(format, str) and format in GGUF:
        _check_gguf(dtype, max_shard_size)
        return _gguf(model, path, format, recipe, tokenizer)
    quantized, layout = _quantized(model, recipe), None if format is None else get_layout(format)
    made = write_pretrained(quantized, path, layout, stored, max_shard_size, _tokenizer_files(tokenizer))
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    return Exported(path, made.layout.name, made.described["recipe"]["name"], nbytes, made.quantized, made.kept)


def check_format(format: str | Layout | None) -> None:
    """Raise a LayoutError if there is no format of that name."""
    if isinstance(format, str) and format not in GGUF and format not in list_layouts():
        raise LayoutError(unknown("format", format, [*list_layouts(), *GGUF]))


def _check_gguf(dtype: str | torch.dtype | None, max_shard_size: int | str) -> None:
    """Refuse arguments that a GGUF file does not support."""
    if dtype is not None:
        raise LayoutError(
            f"dtype={str(dtype)!r} is given, but a GGUF format's name sets it: leave it out, and take gguf-bf16 or "
            "gguf-f32"
        )
    if max_shard_size != _SHARD:
        raise LayoutError(
            f"max_shard_size={max_shard_size!r} is given, but GGUF is one file: leave it out; llama.cpp's "
            "llama-gguf-split splits it"
        )


def _gguf(
    model: torch.nn.Module, path: Path, format: str, recipe: str | Recipe | None, tokenizer: str | Path | None
) -> Exported:
    """Write a GGUF file; the weights of a stock model without a recipe are written unrounded."""
    found, folder = part_of(model).applied, None if tokenizer is None else _folder(tokenizer)
    plain = recipe is None and not (isinstance(found, Applied) and (found.quantized or _rounds(found.recipe)))
    name, kind, quantized, kept = import_module("halfstep.serving.gguf").write_gguf(
        model if plain else _quantized(model, recipe), path, format, halfstep.__version__, folder
    )
    return Exported(path, format, name, path.stat().st_size, quantized, kept, kind)


def _quantized(model: torch.nn.Module, recipe: str | Recipe | None) -> torch.nn.Module:
    """The model, or a copy of it, with its weights as codes."""
    found = part_of(model).applied
    wanted = None if recipe is None else get_recipe(recipe)
    if isinstance(found, Applied):
        if wanted is not None and wanted != found.recipe:
            raise RecipeError(
                f"this {type(model).__name__} follows {found.recipe.name!r}, and recipe={wanted.name!r} is given; "
                "leave it out, or halfstep.revert the model first"
            )
        if found.quantized:
            return model
        if not _rounds(found.recipe):
            raise RecipeError(
                f"this {type(model).__name__} follows {found.recipe.name!r}, which rounds no weights in its matmuls: "
                "model.save_pretrained(folder) writes it unrounded. To serve it in few bits, halfstep.revert it and "
                f"give a recipe (one of {', '.join(_rounding())})"
            )
        wanted = found.recipe
    if wanted is None:
        raise RecipeError(
            f"this {type(model).__name__} follows no recipe, which would say how to round its weights: give one "
            f"(recipe='fp8-rowwise'; one of {', '.join(_rounding())})"
        )
    made = copy.deepcopy(model)
    made.zero_grad(set_to_none=True)
    quantize_model(made, wanted)
    return made


def _tokenizer_files(folder: str | Path | None) -> list[Path]:
    """The files of a tokenizer and of a processor in the folder."""
    if folder is None:
        return []
    return sorted({file for pattern in _TOKENIZER_FILES for file in _folder(folder).glob(pattern) if file.is_file()})


def _folder(tokenizer: str | Path) -> Path:
    path = Path(tokenizer).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"tokenizer={str(tokenizer)!r} is not a folder; name one that holds a tokenizer's files")
    return path


def _rounding() -> list[str]:
    """The recipes whose weights some layout can hold."""
    return [name for name in list_recipes() if layouts_of(get_recipe(name))]


def _rounds(recipe: Recipe) -> bool:
    return any(rule.linear.output.rhs is not None for stage in recipe.by_stage for rule in stage.rules)


def layouts_of(recipe: Recipe) -> list[Layout]:
    """The layouts that can hold a recipe's weights bit for bit, the closest first; none if it rounds no weights."""
    products = [rule.linear.output for rule in recipe.rules if rule.linear.output.rhs is not None]
    if recipe.stages or recipe.unit_scaled or not products or any(product.hadamard for product in products):
        return []
    weights = tuple(dict.fromkeys(product.rhs.plain for product in products if product.rhs is not None))
    return fitting(weights, tuple(product.lhs for product in products))
