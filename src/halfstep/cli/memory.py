"""`halfstep memory`: the bytes of a training setup by role, computed before it exists."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli.terminal import answer, save_figure, stages, table_text
from halfstep.errors import AccountError
from halfstep.text import printable


if TYPE_CHECKING:
    from halfstep.accounting import Account, Share, Subject

_ROWS = {
    "weights": "weights", "gradients": "gradients", "master": "master copies", "states": "optimizer states",
    "scales": "scales of codes", "buffers": "buffers", "communication": "communication buffers",
    "sent": "sent to others in a step",
    "kv_cache": "KV cache", "persistent": "persistent", "compute_copies": "compute copies of weights",
    "activations": "saved activations", "update": "temporaries of a step", "peak": "peak",
}  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """The options that apply to every recipe."""

    batch: int
    sequence: int | None
    optimizer: str
    checkpointing: str
    per_layer: bool
    ranks: int
    zero: int
    memory: int | None


def memory(
    model: Annotated[
        str,
        typer.Argument(
            help="An architecture's name (llama-7b, gpt3-175b, bert-large ...), a config.json or its folder, a "
            "safetensors file, module:function or file.py:function."
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="A recipe; repeat for several side by side. Default: bf16-mixed."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a device's batch.")] = 1,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens in an example. Default: the model's context length, at most 2048.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd, momentum, lion or lamb.")] = "adamw",
    dp: Annotated[int, typer.Option(help="Data-parallel devices, each with its own batches.")] = 1,
    zero: Annotated[
        int, typer.Option(help="ZeRO stage over --dp: 1 shards masters and states, 2 gradients too, 3 weights too.")
    ] = 0,
    checkpointing: Annotated[
        str, typer.Option(help="Recomputation in the backward pass: none, selective (attention) or full.")
    ] = "none",
    per_layer: Annotated[
        bool,
        typer.Option("--per-layer", help="The optimizer steps within the backward pass, so no gradient is stored."),
    ] = False,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of a device with its unit, 80GB or 74GiB: the largest batch that fits.")
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Weights and the KV cache; nothing is trained.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: bytes.")] = False,
    plot: Annotated[str | None, typer.Option(help="Draw it to this file: memory.png, memory.svg.")] = None,
) -> None:
    """Count the bytes of training MODEL, by role: each recipe is run on tensors without storage.

    Exit code 0: counted, and it fits --device-memory if given; 1: a recipe does not fit; 2: it cannot be counted.
    """
    with stages("loading torch and the model") as progress:
        from halfstep.accounting import bytes_from, check_ranks, load_subject
        from halfstep.recipe import get_recipe

        limit = None if device_memory is None else bytes_from(device_memory)
        recipes = [get_recipe(name) for name in recipe or ["bf16-mixed"]]
        check_ranks(dp, zero)
        if per_layer and dp > 1:
            raise AccountError("--per-layer steps before gradients are summed over devices; leave --dp out")
        subject = load_subject(model)
        plan = _Plan(batch, seq, optimizer, checkpointing, per_layer, dp, zero, limit)
        found = [(_inference if inference else _training)(subject, each, plan, progress) for each in recipes]
    if plot is not None:
        _draw(plot, subject, found, limit, inference)
    setup = {k: v for k, v in asdict(plan).items() if k != "memory"} | {"device_memory": limit}
    data = {"model": model, "inference": inference, **setup, "remarks": subject.remarks, "recipes": found}
    answer(as_json, lambda: data, lambda: _text(subject, found, plan, inference, device_memory))
    raise typer.Exit(int(any(row.get("largest_batch") == 0 for row in found)))


def _training(subject: "Subject", recipe: Any, plan: _Plan, progress: Any) -> dict[str, Any]:
    from halfstep.accounting import account, largest, share

    def counted(batch: int) -> "tuple[Account, Share]":
        progress(f"{recipe.name}: a batch of {batch}")
        made = account(
            subject,
            recipe,
            batch=batch,
            sequence=plan.sequence,
            optimizer=plan.optimizer,
            checkpointing=plan.checkpointing,
            per_layer=plan.per_layer,
        )
        return made, share(made, plan.ranks, plan.zero)

    made, part = counted(plan.batch)
    sizes = {name: getattr(part, name) for name in _ROWS if hasattr(part, name)}
    if not made.passes:
        sizes |= dict.fromkeys(("compute_copies", "activations", "peak"))
    found: dict[str, Any] = {
        "recipe": recipe.name,
        "parameters": made.parameters,
        "trained": made.trained,
        "bytes": sizes,
        "bytes_per_parameter": made.per_parameter,
    }
    if plan.memory is not None:
        if not made.passes:
            raise AccountError(
                f"{subject.name}: the largest batch takes a model that can be run, and a checkpoint has no forward "
                "pass; give its config.json or its folder, or leave --device-memory out"
            )
        batch, peak = largest(lambda batch: counted(batch)[1].peak, plan.memory, (plan.batch, part.peak))
        found |= {"largest_batch": batch, "its_peak": peak}
    return found


def _inference(subject: "Subject", recipe: Any, plan: _Plan, progress: Any) -> dict[str, Any]:
    from halfstep.accounting import inference, largest

    if plan.ranks > 1 or plan.zero or plan.checkpointing != "none" or plan.per_layer:
        raise AccountError(
            "--inference counts one device that trains nothing; leave --dp, --zero, --checkpointing and --per-layer out"
        )

    def counted(batch: int) -> Any:
        progress(f"{recipe.name}: a batch of {batch}")
        return inference(subject, recipe, batch=batch, sequence=plan.sequence)

    made = counted(plan.batch)
    found = {"recipe": recipe.name, "bytes": {**asdict(made), "persistent": made.persistent}}
    if plan.memory is not None:
        batch, peak = largest(lambda batch: counted(batch).peak, plan.memory, (plan.batch, made.peak))
        found |= {"largest_batch": batch, "its_peak": peak}
    return found


def _title(subject: "Subject", first: dict[str, Any], plan: _Plan, inference: bool) -> str:
    length = plan.sequence or subject.sequence
    examples = f"a batch of {plan.batch}" + (f" x {length} tokens" if length else "")
    if inference:
        return f"{printable(subject.name)}: inference, {examples}"
    frozen = first["parameters"] - first["trained"]
    return (
        f"{printable(subject.name)}: {first['parameters']:,} parameters"
        + (f", {frozen:,} of them frozen" if frozen else "")
        + f"; {examples}; {plan.optimizer}"
        + (f"; {plan.checkpointing} checkpointing" if plan.checkpointing != "none" else "")
        + ("; steps within the backward pass" if plan.per_layer else "")
        + (f"; one of {plan.ranks} devices, ZeRO stage {plan.zero}" if plan.ranks > 1 else "")
    )


def _text(subject: "Subject", found: list[dict[str, Any]], plan: _Plan, inference: bool, given: str | None) -> str:
    unit, size = ("GiB", 2**30) if max(row["bytes"]["persistent"] for row in found) >= 2**30 else ("MiB", 2**20)

    def cells(role: str, divisor: int) -> list[str]:
        sizes = [row["bytes"].get(role) for row in found]
        return ["unknown" if number is None else f"{number / divisor:,.2f}" for number in sizes]

    counted = {
        role: [row["bytes"][role] for row in found] for role in _ROWS if all(role in row["bytes"] for row in found)
    }
    shown = [
        role
        for role, sizes in counted.items()
        if role in ("persistent", "peak", "weights") or any(n != 0 for n in sizes)
    ]
    rows = [(_ROWS[role], *cells(role, size)) for role in shown]
    if any(row["bytes"]["peak"] is not None for row in found):
        rows.append((f"peak, in {unit.replace('i', '')}", *cells("peak", 10**9 if unit == "GiB" else 10**6)))
    if plan.ranks > 1:
        sizes = [row["bytes"]["persistent"] * plan.ranks / size for row in found]
        rows.append((f"persistent, all {plan.ranks} devices", *(f"{number:,.2f}" for number in sizes)))
    if not inference:
        rows.append(("persistent bytes a parameter", *(f"{row['bytes_per_parameter']:.4g}" for row in found)))
    if given is not None:
        rows.append((f"largest batch in {given}", *(f"{row['largest_batch'] or 'none'}" for row in found)))
        rows.append((f"its peak, {unit}", *(f"{row['its_peak'] / size:,.2f}" for row in found)))
    names = [row["recipe"] for row in found]
    title, counts = _title(subject, found[0], plan, inference), table_text([unit, *names], rows, right=names)
    return "\n".join([title, counts, *map(printable, subject.remarks)])


def _draw(path: str, subject: "Subject", found: list[dict[str, Any]], limit: int | None, inference: bool) -> None:
    from halfstep.accounting import Share
    from halfstep.accounting.plot import figure

    if inference or any(row["bytes"]["peak"] is None for row in found):
        raise AccountError(
            "--plot draws the step of a model that trains; leave --inference out, or give a model that runs"
        )
    roles = {row["recipe"]: {k: v for k, v in row["bytes"].items() if k != "persistent"} for row in found}
    drawn = figure(subject.name, {name: Share(**sizes) for name, sizes in roles.items()}, limit)
    save_figure(drawn, path, "memory", AccountError)
    typer.echo(f"wrote {path}", err=True)
