"""Is it safe to run a model in another type than it was trained in? Rules, reasons, and answers in words."""

import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from halfstep.errors import FormatError, KnowledgeBaseError, unknown
from halfstep.formats import get
from halfstep.kb.reader import DEFAULT_OVERLAY, Entry, FailureReport, KnowledgeBase, Reference, compute, load, uses
from halfstep.kb.resolve import Answer, find
from halfstep.text import holding, printable


_VERDICTS = {"none": "safe", "low": "safe", "medium": "risky", "high": "risky", "unknown": "unknown"}
_CAREFUL = ("safe", "unknown", "risky")  # from the least to the most careful advice
_REPORTED = {
    "safe": ("unknown", "that says it is safe, and failures in {use} are reported: the two do not agree"),
    "unknown": ("risky", "failures in {use} are reported"),
}
"""The effect of failure reports on an entry's verdict; export/page.js says the same."""
_RANGE_STEP = (
    "run one batch in fp32 and record the largest activation of every module: above 16000, a quarter of fp16's "
    "largest value, take fp16 for unsafe; a backward pass can overflow where the forward pass does not"
)


@dataclass(frozen=True)
class Cast:
    """One cell of the table: its risk, the reason, and the parts to keep in fp32 if it is done anyway."""

    native: str
    use: str
    risk: str
    reason: str
    keep_in_fp32: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """safe, risky or unknown."""
        return _VERDICTS[self.risk]


@cache
def casts() -> Mapping[tuple[str, str], Cast]:
    """All cells by (training type, type to run in)."""
    rows = tomllib.loads(files("halfstep.kb").joinpath("casts.toml").read_text(encoding="utf-8"))["cast"]
    natives = list(dict.fromkeys(native for row in rows for native in row["native"] if native != "any"))
    cells: dict[tuple[str, str], Cast] = {}
    # The lines for "any" come first, so that a type's own line overwrites them.
    for row in sorted(rows, key=lambda row: row["native"] != ["any"]):
        for native in natives if row["native"] == ["any"] else row["native"]:
            texts = {name: tuple(row.get(name, ())) for name in ("keep_in_fp32", "sources")}
            cells[native, row["use"]] = Cast(native, row["use"], row["risk"], row["reason"], **texts)
    return cells


def normal_use(use: object) -> str:
    """The table's name of a type to run in; torch's names and a `torch.dtype` are accepted.

    >>> normal_use("float16"), normal_use("torch.bfloat16"), normal_use("float8_e4m3fn")
    ('fp16', 'bf16', 'fp8')

    Raises:
        KnowledgeBaseError: no type of that name; the message lists the known ones.
    """
    word = str(use).removeprefix("torch.").lower()
    if word not in uses():
        with suppress(FormatError):
            word = get(word).name
    if word.startswith("float8"):
        return "fp8"
    if word not in uses():
        raise KnowledgeBaseError(unknown("type to run a model in", str(use), uses()))
    return word


@dataclass(frozen=True)
class Reason:
    """The verdict of one entry, or of one part of a model, on a use."""

    verdict: str
    text: str
    train_precision: str = "unknown"
    entry: str | None = None
    part: str | None = None
    keep_in_fp32: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """safe, risky or unknown, with all its evidence."""

    model_id: str
    use: str
    verdict: str
    reasons: tuple[Reason, ...]
    answer: Answer

    @property
    def safe(self) -> bool:
        """Whether the verdict is safe; `bool(verdict)` is the same."""
        return self.verdict == "safe"

    def __bool__(self) -> bool:
        return self.safe

    @property
    def references(self) -> tuple[Reference, ...]:
        """The references of the entries."""
        return tuple(dict.fromkeys(reference for entry in self.answer.entries for reference in entry.references))

    @property
    def failures(self) -> tuple[FailureReport, ...]:
        """The reports on this use of this model, failures before fixes."""
        found = [report for report in self.answer.failures if self.use in report.uses]
        return tuple(sorted(found, key=lambda report: report.kind))

    @property
    def keep_in_fp32(self) -> tuple[str, ...]:
        """The parts to keep in fp32 when running the rest in `use`."""
        if self.use in ("fp32", "tf32"):
            return ()
        return tuple(dict.fromkeys(part for reason in self.reasons for part in reason.keep_in_fp32))

    @property
    def next_steps(self) -> tuple[str, ...]:
        """What to do if the verdict is not safe."""
        steps = {
            _RANGE_STEP: self.use == "fp16",
            f"compare its outputs in {self.use} with those in fp32, on your own data": True,
            "if you know how it was trained and can cite it, add it: halfstep kb add": not self.answer.known,
        }
        return () if self.safe else tuple(holding(steps))


def check(model_id: str, use: object, overlay: Path | str | None = DEFAULT_OVERLAY) -> Verdict:
    """Whether a model can be run in a type: fp32, tf32, bf16, fp16, int8, fp8, mxfp4 or nvfp4.

    If entries conflict, or parts of a model differ, the more careful advice is the verdict, and all reasons are given.

    >>> check("google/flan-t5-xxl", use="fp16", overlay=None).verdict
    'risky'
    >>> check("google/flan-t5-xxl", use="bf16", overlay=None).verdict
    'safe'

    Raises:
        KnowledgeBaseError: the type is unknown, or the overlay or a local folder cannot be read.
    """
    return judge(load(overlay), model_id, use)


def judge(base: KnowledgeBase, model_id: str, use: object) -> Verdict:
    """`check` in a given knowledge base."""
    word = normal_use(use)
    answer = find(base, model_id)
    reasons = tuple(reason for entry in answer.entries for reason in reasons_of(entry, word))
    if not reasons:
        reasons = (_without_an_entry(answer, word),)
    elif _failed(answer, word) and most_careful(reasons) in _REPORTED:
        verdict, text = _REPORTED[most_careful(reasons)]
        reasons += (Reason(verdict, text.format(use=word)),)
    return Verdict(answer.model_id, word, most_careful(reasons), reasons, answer)


def most_careful(reasons: Iterable[Reason]) -> str:
    """The most careful verdict among several reasons."""
    return max((reason.verdict for reason in reasons), key=_CAREFUL.index)


def reasons_of(entry: Entry, use: str) -> tuple[Reason, ...]:
    """An entry's verdict on a use: one reason, or one for each part of the model."""
    parts: list[tuple[str | None, str]] = [*entry.parts.items()] or [(None, entry.train_precision)]
    return tuple(_reason(entry, part, precision, use) for part, precision in parts)


def _reason(entry: Entry, part: str | None, precision: str, use: str) -> Reason:
    cast = casts()[compute(precision), use]
    verdict, text = cast.verdict, cast.reason
    if use in entry.safe:
        verdict, text = "safe", entry.safe[use]
    if use in entry.risky:
        verdict, text = "risky", entry.risky[use]
    own = entry.keep_in_fp32 + entry.higher_precision_parts
    return Reason(verdict, text, precision, entry.id, part, own or cast.keep_in_fp32, cast.sources)


def _failed(answer: Answer, use: str) -> bool:
    return any(use in report.uses and report.kind == "failure" for report in answer.failures)


def _without_an_entry(answer: Answer, use: str) -> Reason:
    if _failed(answer, use):
        return Reason("risky", f"no entry says how it was trained, but failures in {use} are reported")
    if answer.bases:
        return Reason(
            "unknown", f"no entry for this model, nor for what the folder names as its base: {', '.join(answer.bases)}"
        )
    return Reason("unknown", "no entry says how this model was trained")


def describe_entry(entry: Entry) -> str:
    """An entry in full, one field per line."""
    ids = [name if entry.confirms(name) else f"{name} (id unconfirmed)" for name in entry.model_ids]
    rows = [
        ("family", f"{entry.family}, {entry.year}"),
        ("trained in", _trained_in(entry)),
        ("tier", f"{entry.tier} (evidence: {entry.evidence_kind.replace('_', ' ')})"),
        ("stage", entry.stage.replace("_", " ")),
        ("read as", entry.excerpt_only and "an excerpt: open the references before quoting them"),
        ("says", entry.paraphrase),
        ("note", entry.notes),
        ("an entry of its own", entry.reason),
        ("master weights", entry.master_weight_dtype),
        ("optimizer state", entry.optimizer_state_dtype),
        ("gradient sums", entry.grad_accum_dtype),
        ("kept higher", ", ".join(entry.higher_precision_parts)),
        ("keep in fp32", ", ".join(entry.keep_in_fp32)),
        ("hardware", entry.hardware),
        ("framework", entry.framework),
        ("released as", entry.released_dtype and f"{entry.released_dtype} (storage; no evidence of training)"),
        ("conflicts with", entry.conflict_with),
        ("your own entry", entry.origin if entry.overlay else None),
        *((f"safe in {use}", reason) for use, reason in entry.safe.items()),
        *((f"risky in {use}", reason) for use, reason in entry.risky.items()),
        ("models", ", ".join((*ids, *entry.aliases))),
        ("official", entry.official),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows if value]
    return _text([entry.id, *_indented(lines), "references", *_indented(map(_cite, entry.references))])


def describe_answer(answer: Answer) -> str:
    """All entries for a model, how they were found, and the failure reports."""
    reports = [*_indented(map(_report, answer.failures))]
    blocks = [_text(_found(answer)), *map(describe_entry, answer.entries)]
    return "\n\n".join([*blocks, *([_text(["failure reports", *reports])] if reports else [])])


def describe_verdict(verdict: Verdict, more_steps: Iterable[str] = ()) -> str:
    """A verdict with its reasons, references, failure reports and next steps; `more_steps` are added to the latter."""
    lists = {
        "references": [*map(_cite, verdict.references)],
        "on this cast in general": dict.fromkeys(source for reason in verdict.reasons for source in reason.sources),
        "failure reports": [*map(_report, verdict.failures)],
        "next": [*verdict.next_steps, *more_steps],
    }
    return _text(
        [
            f"{verdict.verdict}: {verdict.model_id} in {verdict.use}",
            *_found(verdict.answer),
            *map(because, verdict.reasons),
            *([f"keep in fp32: {', '.join(verdict.keep_in_fp32)}"] if verdict.keep_in_fp32 else []),
            *(line for title, items in lists.items() if items for line in (title, *_indented(items))),
        ]
    )


def because(reason: Reason) -> str:
    """One reason of a verdict, as a line."""
    if reason.entry is None:
        return reason.text
    who = f"{reason.part}: {reason.verdict}, trained in" if reason.part else "trained in"
    return f"{who} {reason.train_precision}: {reason.text}"


def _found(answer: Answer) -> list[str]:
    one, matched = "entry" if len(answer.entries) == 1 else "entries", ", ".join(answer.matched)
    way = f"{one} {', '.join(entry.id for entry in answer.entries)}, {answer.tier}, found by {answer.how} {matched}"
    unsure = answer.how == "exact id" and not answer.id_confirmed
    precisions = ", ".join(dict.fromkeys(map(_trained_in, answer.entries)))
    said = {
        f"no entry for {answer.model_id}": not answer.known,
        f"nearest names: {', '.join(answer.near)}": not answer.known and answer.near,
        f"{way}{' (hub id unconfirmed: no reference names it)' * unsure}": answer.known,
        f"base {matched} was pre-trained in {precisions}; this one: not stated": answer.how == "base model",
        "the entries conflict: all of them are shown, and the more careful advice counts": answer.conflict,
        f"stored as {answer.stored_dtype}, says config.json; that is no evidence of how it was trained": (
            answer.stored_dtype is not None
        ),
    }
    return holding(said)


def _trained_in(entry: Entry) -> str:
    if entry.parts:
        return "; ".join(f"{part} {precision}" for part, precision in entry.parts.items())
    return entry.train_precision


def _cite(reference: Reference) -> str:
    return f"{reference.kind}: {reference.locator}\n  {reference.url}"


def _report(report: FailureReport) -> str:
    note = f" ({report.note})" if report.note else ""
    return f"{report.kind}: {report.model} in {report.tried}: {report.symptom}{note}\n  {report.url}"


def _indented(items: Iterable[str]) -> list[str]:
    return [f"  {line}" for item in items for line in item.split("\n")]


def _text(lines: Iterable[str]) -> str:
    return "\n".join(printable(line) for line in lines)
