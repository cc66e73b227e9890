"""The result of an audit: records, text, JSON, and the differences between two audits."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

from halfstep.errors import CheckpointError
from halfstep.inspection.files import parse_object
from halfstep.text import grouped, holding, shortened, some


SCHEMA = 1
"""The version of `Audit.to_dict`: adding fields keeps it; renaming or dropping fields increases it."""

COLUMNS = 100
"""The width of the text, unless names are longer."""

SHORT = {"unknown": "?", None: "-"}


@dataclass(frozen=True)
class Item:
    """One tensor; for a sharded one, this rank's shard."""

    kind: str
    """parameters, gradients, master, scales, buffers, or the name of an optimizer's state (exp_avg)."""
    name: str
    """The name of the parameter that it belongs to, or of the buffer."""
    role: str
    """The parameter's or buffer's role, derived from its name: norm, embedding ..."""
    dtype: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    effective: str | None
    """The precision by the bits (`bits.origin.Origin.key`): "full", or the narrower type that every value fits ("bf16",
    "partly bf16"); "unknown" if too few values are informative; None for scales, and if not floating point."""
    nonfinite: int = 0
    shared_with: str | None = None
    """The first tensor with the same storage, which alone is counted."""
    zeros: int = 0
    """The number of zeros among the values whose bits were read."""

    @property
    def label(self) -> str:
        """Its name for a sentence."""
        return self.name if self.kind in ("parameters", "buffers", "scales") else f"{self.kind} of {self.name}"


@dataclass(frozen=True)
class Row:
    """All tensors of one kind with the same dtype and the same verdict of the bits."""

    kind: str
    dtype: str
    effective: str | None
    roles: tuple[str, ...]
    tensors: int
    numel: int
    nbytes: int


@dataclass(frozen=True)
class Finding:
    """A statement in words: a warning, or a note on something that may be intended."""

    level: Literal["warning", "note"]
    what: str
    """The kind of finding, in one word."""
    text: str
    tensors: tuple[str, ...]
    """All tensors that it is about; the text names the first ones."""

    def __str__(self) -> str:
        names = f" ({len(self.tensors)}): {some(self.tensors)}" if self.tensors else ""
        return folded(f"{self.level}: {self.text}{names}")


@dataclass(frozen=True)
class Audit:
    """Every tensor of a training setup, as stored and by its bits. `print(report)` shows it."""

    model: str
    optimizer: str | None
    trained: int
    """Parameters that require a gradient, or all if none does; on this rank."""
    steps: tuple[int, int] | None
    """The fewest and the most steps that the optimizer has counted for a parameter; None if it counts none."""
    loss_scale: float | None
    held: int
    """Bytes of all storages. Tensors that are views keep the whole storage allocated."""
    items: tuple[Item, ...]
    findings: tuple[Finding, ...]
    stage: str | None = None
    """The current stage of the recipe, if it has several."""
    plan: str | None = None
    """What the recipe does to the model's layers (`halfstep.Plan`), if the model follows one."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, shared ones counted once."""
        return sum(item.nbytes for item in self.items if item.shared_with is None)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are warnings, not notes."""
        return tuple(finding for finding in self.findings if finding.level == "warning")

    @property
    def rows(self) -> tuple[Row, ...]:
        """The table's rows: by kind, then by dtype and verdict of the bits, the most values first."""
        kinds = grouped((item.kind, item) for item in self.items if item.shared_with is None)
        alike = {kind: grouped(((item.dtype, item.effective), item) for item in items) for kind, items in kinds.items()}
        rows = [
            Row(
                kind,
                *key,
                tuple(dict.fromkeys(item.role for item in items)),
                len(items),
                sum(item.numel for item in items),
                sum(item.nbytes for item in items),
            )
            for kind, groups in alike.items()
            for key, items in groups.items()
        ]
        places = {kind: place for place, kind in enumerate(kinds)}
        return tuple(sorted(rows, key=lambda row: (places[row.kind], -row.numel)))

    def differences(self, before: "Audit") -> tuple[str, ...]:
        """The changes since an earlier audit, such as one from before a resume, one sentence each.

        Gradients are compared only if both audits have some. A tensor that was not informative before may be so now.
        """
        now, then = ({(item.kind, item.name): item for item in one.items} for one in (self, before))
        both = all(any(kind == "gradients" for kind, _ in named) for named in (now, then))
        compared = [key for key in then | now if both or key[0] != "gradients"]
        changed = {key: change for key in compared if (change := _change(then.get(key), now.get(key)))}
        changes = grouped((f"{kind}: {change}", name) for (kind, name), change in changed.items())
        had, has = (0 if one.steps is None else one.steps[1] for one in (before, self))
        counted = "none" if self.steps is None else has
        said = {
            f"steps counted by the optimizer: {had} before, {counted} now": (
                before.steps is not None and (self.steps is None or has < had)
            ),
            **{f"{change}: {some(names)}": True for change, names in changes.items()},
            f"recipe: {before.stage} before, {self.stage} now": before.stage != self.stage,
            f"loss scale: {before.loss_scale} before, {self.loss_scale} now": before.loss_scale != self.loss_scale,
        }
        return tuple(holding(said))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {"schema": SCHEMA, **asdict(self), "nbytes": self.nbytes, "rows": [asdict(row) for row in self.rows]}

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, which `load` reads."""
        Path(path).write_text(json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> "Audit":
        """The report written by `save`.

        Raises:
            CheckpointError: the file contains something else, or a report of another version.
        """
        data = parse_object(Path(path).read_bytes(), str(path))
        if data.get("schema") != SCHEMA or "items" not in data:
            raise CheckpointError(
                f"{path} holds schema {data.get('schema')!r}; expected an audit of schema {SCHEMA}: save it again with "
                "halfstep.audit(model, optimizer).save(path)"
            )
        try:
            return cls(
                **{key: data[key] for key in ("model", "optimizer", "trained", "loss_scale", "held")},
                steps=None if data["steps"] is None else tuple(data["steps"]),
                items=tuple(Item(**{**item, "shape": tuple(item["shape"])}) for item in data["items"]),
                findings=tuple(Finding(**{**one, "tensors": tuple(one["tensors"])}) for one in data["findings"]),
                stage=data.get("stage"),
                plan=data.get("plan"),
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a whole audit ({error}); save it again") from error

    def __str__(self) -> str:
        plan = [] if self.plan is None else [self.plan]
        return shortened([self._title(), *plan, *_table(self), *map(str, self.findings)])

    def _title(self) -> str:
        ends = " to ".join(f"{step:,}" for step in sorted({*(self.steps or ())}))
        steps = "" if self.steps is None else f", {ends} step{'s' * (self.steps != (1, 1))}"
        scale = "" if self.loss_scale in (None, 1.0) else f", loss scale {self.loss_scale:g}"
        stage = "" if self.stage is None else f"; {self.stage}"
        trained = f"{self.trained:,} trained parameters"
        return f"{self.model}, {self.optimizer or 'no optimizer'}: {trained}{steps}{scale}{stage}"


def folded(text: str) -> str:
    """A text wrapped to `COLUMNS` characters."""
    return fill(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _change(before: Item | None, now: Item | None) -> str | None:
    """The change of one tensor, in words; None if it did not change."""
    if before is None or now is None:
        return f"{_said(before)} before, {_said(now)} now"
    if before.shape != now.shape:
        return f"shape {before.shape} before, {now.shape} now"
    told = before.effective != "unknown" and before.effective != now.effective
    return f"{_said(before)} before, {_said(now)} now" if told or before.dtype != now.dtype else None


def _said(item: Item | None) -> str:
    if item is None:
        return "missing"
    said = "?" if item.effective == "unknown" else item.effective
    return item.dtype if said is None else f"{item.dtype} ({said})"


_HEADER = ("", "stored", "bits say", "tensors", "values", "MB", "B/param")
_LEFT = ("", "stored", "bits say")


def _table(report: Audit) -> list[str]:
    """The rows as aligned text, and a total."""
    per, rows = report.trained or 1, report.rows
    total = Row("total", "", "", (), sum(row.tensors for row in rows), sum(row.numel for row in rows), report.nbytes)
    cells = [
        (
            row.kind,
            row.dtype,
            SHORT.get(row.effective, row.effective or ""),
            f"{row.tensors:,}",
            f"{row.numel:,}",
            _megabytes(row.nbytes),
            _decimals(row.nbytes / per),
        )
        for row in (*rows, total)
    ]
    widths = [max(map(len, column)) for column in zip(_HEADER, *cells, strict=True)]
    lines = [
        "  ".join(
            f"{cell:{'<' if name in _LEFT else '>'}{wide}}"
            for cell, wide, name in zip(line, widths, _HEADER, strict=True)
        )
        for line in (_HEADER, *cells)
    ]
    held = [f"their storages hold {_megabytes(report.held)} MB"] if report.held != report.nbytes else []
    alone, room = [row.kind for row in rows], COLUMNS - len(lines[0]) - 2
    roles = ["" if alone.count(row.kind) == 1 else _fitting(row.roles, room) for row in rows]
    said = ["roles" if any(roles) else "", *roles, ""]
    return [f"{line}  {last}".rstrip() for line, last in zip(lines, said, strict=True)] + held


def _fitting(names: Sequence[str], room: int) -> str:
    """As many of the names as fit, and how many more there are."""
    texts = (some(names, shown) for shown in range(len(names), 0, -1))
    return next((text for text in texts if len(text) <= room), f"{len(names)} roles" if len(names) > 1 else names[0])


def _megabytes(nbytes: int) -> str:
    return _decimals(nbytes / 1e6) if nbytes < 1e7 else f"{nbytes / 1e6:,.1f}"


def _decimals(value: float) -> str:
    """The value with three decimals; "<0.001" for a non-zero value that would show as zero."""
    return "<0.001" if 0 < value < 0.0005 else f"{value:.3f}"
