"""`halfstep export`: write a model as a folder that servers load, with its weights rounded as in training."""

import json
from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli.terminal import answer, stages, table_text
from halfstep.errors import CheckpointError


def export(
    model: Annotated[
        str | None, typer.Argument(help="A Hugging Face folder, module:function or file.py:function.")
    ] = None,
    output: Annotated[Path | None, typer.Argument(help="A new folder; for GGUF a new file.")] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", help="The layout of weights in the file; default: the closest to the recipe."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="The recipe by which weights are rounded, for a model that follows none."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Dtype of tensors that are not codes: bf16, fp16, fp32; default: as stored."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Largest size of one safetensors file.")
    ] = "5GB",
    tokenizer: Annotated[bool, typer.Option(help="Also write the tokenizer of MODEL's folder.")] = True,
    listing: Annotated[
        bool, typer.Option("--list", help="List the formats; with --recipe those that can hold its weights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write MODEL for servers: vLLM, SGLang, transformers. The file's values equal those in training's matmuls."""
    if listing:
        _list(recipe, as_json)
        return
    if model is None or output is None:
        raise typer.BadParameter("expected MODEL and OUTPUT, or --list", param_hint="MODEL OUTPUT")
    from halfstep.layouts.folder import check_new_folder, dtype_of
    from halfstep.serving import GGUF, check_format

    check_format(format)  # before the model is loaded
    dtype_of(dtype)
    if format not in GGUF:
        check_new_folder(output.expanduser())
    with stages("loading torch and the model") as progress:
        from halfstep.probe.batch import load_model
        from halfstep.serving import export as write

        loaded = load_model(model).model
        progress("rounding and writing")
        source = Path(model).expanduser() if ":" not in model else None
        stored = dtype if format in GGUF else dtype or _stored(source)
        has = source is not None and (format not in GGUF or any(source.glob("tokenizer*")))
        done = write(
            loaded,
            output,
            format,
            recipe=recipe,
            dtype=stored,
            max_shard_size=max_shard_size,
            tokenizer=source if tokenizer and has else None,
        )
    answer(as_json, lambda: {**vars(done), "path": str(done.path)}, lambda: str(done))


def _stored(folder: Path | None) -> str | None:
    """The dtype named in a folder's config.json, if weights can be stored in it; else None."""
    from halfstep.layouts.folder import dtype_of

    if folder is None:
        return None
    config = json.loads((folder / "config.json").read_text())
    found = config.get("dtype", config.get("torch_dtype"))
    try:
        dtype_of(found)
    except CheckpointError:
        return None
    return found  # type: ignore[no-any-return]


def _list(recipe: str | None, as_json: bool) -> None:
    from halfstep.layouts import get_layout, list_layouts
    from halfstep.recipe import get_recipe
    from halfstep.serving import GGUF, layouts_of

    found = [get_layout(n) for n in list_layouts()] if recipe is None else layouts_of(get_recipe(recipe))
    rows = [(layout.name, layout.summary) for layout in found] + ([*GGUF.items()] if recipe is None else [])
    none = (
        f"no format holds the weights of {recipe!r} bit for bit: it rounds none, or in a way that "
        "servers do not read. docs/export.md has all recipes; a stock model is exported under one of those"
    )
    data = [{"name": name, "summary": summary} for name, summary in rows]
    answer(as_json, lambda: data, lambda: table_text(["format", "what it is"], rows) if rows else none)
