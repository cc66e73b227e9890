"""None of the package's regular expressions can backtrack exponentially in the length of a text."""

import ast
import json
import re
from fnmatch import translate
from pathlib import Path

import halfstep
from backtracking import is_exponential
from families import for_each
from halfstep.inspection.roles import ROLES
from halfstep.kb import load
from halfstep.kb.reader import schema
from halfstep.recipe.operands import KEEP


ROOT = Path(halfstep.__file__).parent
MADE = {
    "inspection/roles.py": [pattern for _, pattern in ROLES],
    "kb/reader.py": [
        *(json.loads(one) for one in re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', json.dumps(schema()))),
        "[^/]*[^/]*",
        "[^/]*a[^/]*",
    ],
    "nn/paths.py": [translate(glob) for rule in KEEP for glob in rule.path.split("|")],
}
"""Expressions of files that build them elsewhere than where they are used."""


def expressions():
    """(file, expression) for each use of `re` in the package; None if the expression is built elsewhere."""
    for file in sorted(ROOT.rglob("*.py")):
        source = file.read_text()
        assert "from re import" not in source, f"{file}: import re as a whole"
        for node in ast.walk(ast.parse(source)) if "import re\n" in source else ():
            match node:
                case ast.Call(ast.Attribute(ast.Name("re"), called), [first, *_]) if called != "escape":
                    yield str(file.relative_to(ROOT)), text(first)


def text(node):
    """The expression as written, with "word" for each formatted value."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "word" for part in node.values)
    return None


FOUND = list(expressions())
ALL = [(file, one) for file, one in FOUND if one is not None] + [(f, one) for f, many in MADE.items() for one in many]


@for_each("pattern, exponential", [
    (r"(a+)+b", True), (r"(a|a)*b", True), (r"(a|aa)*b", True), (r"(\w*x?)*-", True), (r"((a*)*)b", True),
    (r"(?:-(?:q4(_[0-9a-z]+)*|\d+g)|_q4)+$", True), (r"(\d+,?)*x", True), (r"([ab]{2}|[bc]{2})*d", True),
    (r"x(?=(a+)+b)", True), (r"(?i)(ka|KA)*x", True), (r"(a{1,2}){20,}b", True),
    (r"a*b*c", False), (r"(a|b)*c", False), (r"(-[a-z]+)*x", False), (r"\w*attn\w*", False), (r"(ab?)*c", False),
    (r"(?:[ \t]*-.*\n)*", False), (r"([^/]+/)+x", False), (r"a{1,3}a{1,3}b", False), (r"(\d+|all)x(\d+|all)", False),
])  # fmt: skip
def test_exponential_patterns_are_recognised(pattern, exponential):
    assert is_exponential(pattern) is exponential


def test_every_expression_of_the_package_is_tested():
    assert {file for file, one in FOUND if one is None} == set(MADE)
    assert len(ALL) > 60
    assert all(MADE.values())


@for_each("file, pattern", ALL)
def test_no_expression_is_exponential(file, pattern):
    assert not is_exponential(pattern, re.IGNORECASE | re.MULTILINE)


def test_globs_of_the_knowledge_base_have_at_most_two_stars():
    """With two stars matching is quadratic in the name's length; each further star adds a power."""
    assert max(name.count("*") for entry in load(None).entries for name in entry.model_ids) <= 2
