"""The schema checker: agrees with the jsonschema library, and gives messages."""

import copy
import tomllib

import jsonschema
import pytest
from hypothesis import given, strategies as st

from families import for_each
from halfstep.kb.reader import data_files, package_folder, problems, schema, text_of


FILES = [tomllib.loads(text_of(file)) for file in data_files(package_folder())]
TABLES = [("entry", table) for file in FILES for table in file.get("entry", ())]
TABLES += [("failure", table) for file in FILES for table in file.get("failure", ())]


def accepted_by_jsonschema(value, kind):
    rule = {**schema(), "$ref": f"#/$defs/{kind}"}
    del rule["type"], rule["properties"], rule["additionalProperties"]
    return jsonschema.Draft202012Validator(rule).is_valid(value)


def test_schema_is_valid():
    jsonschema.Draft202012Validator.check_schema(schema())


@for_each("data", FILES, ids=lambda data: data.get("family", "failures"))
def test_package_files_satisfy_jsonschema(data):
    jsonschema.Draft202012Validator(schema()).validate(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["fp16", "bf16_mixed", "a/b", "", "x\x1b", "https://a.b/c"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["fp16", "kind", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.sampled_from(TABLES), st.data())
def test_checker_agrees_with_jsonschema(table, data):
    kind, value = table
    changed = copy.deepcopy(value)
    field = data.draw(st.sampled_from([*schema()["$defs"][kind]["properties"], "off_topic"]))
    if data.draw(st.booleans()):
        changed[field] = data.draw(values)
    else:
        changed.pop(field, None)
    assert (not list(problems(changed, kind))) == accepted_by_jsonschema(changed, kind)


GOOD = {
    "id": "toy",
    "year": 2024,
    "stage": "pretrain",
    "train_precision": "bf16_mixed",
    "tier": "definitive",
    "evidence_kind": "paper",
    "model_ids": ["toys/toy-1b"],
    "paraphrase": "Says bf16.",
    "references": [{"kind": "paper", "url": "https://arxiv.org/abs/2401.00001", "locator": "section 3"}],
}
REFERENCE = GOOD["references"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_precision": "bf61_mixed"}, "unknown word for entry.train_precision 'bf61_mixed'; nearest: bf16_mixed"),
        (
            {"references": None},
            "'references' is missing; expected at least one [[entry.references]] table: every entry cites",
        ),
        ({"references": []}, "entry.references: found none, expected at least one [[entry.references]] table"),
        (
            {"references": [{**REFERENCE, "url": "http://x.y/z"}]},
            "found 'http://x.y/z', expected an address that starts with https://",
        ),
        (
            {"references": [{**REFERENCE, "url": 'https://x.y/" onclick="'}]},
            "expected an address that starts with https://",
        ),
        (
            {"references": [{**REFERENCE, "commit": "main"}]},
            "found 'main', expected a commit: 7 to 40 hexadecimal digits",
        ),
        ({"references": [{"kind": "paper", "url": "https://x.y/z"}]}, "entry.references[0]: 'locator' is missing"),
        ({"year": "2024"}, "entry.year: found '2024' of type str, expected the year of release"),
        ({"year": True}, "entry.year: found True of type bool"),
        ({"year": 1999}, "entry.year: found 1999, expected the year of release, 2015 or later"),
        ({"model_ids": "toys/toy-1b"}, "found 'toys/toy-1b' of type str, expected a list of hub ids"),
        (
            {"model_ids": ["toy-1b"]},
            "entry.model_ids[0]: found 'toy-1b', expected a hub id of the form organisation/name",
        ),
        ({"model_ids": ["a/b", "a/b"]}, "entry.model_ids: a value is given twice"),
        ({"favourite_colour": "red"}, "unknown field 'favourite_colour'"),
        ({"hardwear": "TPU"}, "unknown field 'hardwear'; nearest: hardware"),
        ({"parts": {"vision": "fp16_mixed"}}, "entry.parts: found 1 of at least 2"),
        ({"parts": {"vision": "fp16", "text": "fp32"}}, "unknown word for entry.parts.vision 'fp16'"),
        ({"safe": {"fp17": "why"}}, "unknown word for entry.safe key 'fp17'; nearest: fp16"),
        ({"paraphrase": "two\nlines"}, "expected one line of text: no line breaks, no control characters"),
        ({"paraphrase": "\x1b[31mred"}, r"found '\x1b[31mred', expected one line of text"),
        ({"tier": "certain"}, "unknown word for entry.tier 'certain'"),
        ({"stage": "warm-up"}, "unknown word for entry.stage 'warm-up'"),
    ],
    ids=str,
)
def test_violations_say_what_to_write_instead(change, message):
    changed = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    found = list(problems(changed, "entry"))
    assert any(message in each for each in found), found
    assert not accepted_by_jsonschema(changed, "entry")


def test_valid_entry_has_no_problem():
    assert list(problems(GOOD, "entry")) == []
