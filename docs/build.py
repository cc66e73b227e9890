"""Builds the pages as a site that needs no network: `make docs`.

The site's sources lie as they lie in the repository, so a page is the file that GitHub shows and its links are right
in both. The index of all pages (docs/README.md) is the navigation. Zensical refuses a link or an anchor that leads
nowhere.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import reference


DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
OUTER = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


def lay_out(pages: Path, libraries: bool = False) -> None:
    """Copy the pages and every file that they link to, and write the reference beside them."""
    for source in (*(ROOT / name for name in OUTER), *DOCS.glob("*.md")):
        _copy(source, pages)
        for link in LINK.findall(source.read_text(encoding="utf-8")):
            target = (source.parent / link).resolve()
            if target.is_relative_to(ROOT) and target.exists():  # where not, zensical says so
                _copy(target, pages)
    reference.write(pages / "docs" / "reference", libraries)


def _copy(source: Path, pages: Path) -> None:
    target = pages / source.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)


def navigation(libraries: bool) -> list[dict[str, object]]:
    """The sections of docs/README.md with the pages that each names, then the reference."""
    found: list[dict[str, object]] = []
    for section in re.split(r"^## ", (DOCS / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        links = re.findall(r"\[([^]]+)\]\(([^)]+\.md)\)", section)
        places = [{_plain(title): _place(path)} for title, path in links]
        found.append({section.partition("\n")[0]: places})
    rooms = [{name: f"docs/reference/{name}.md"} for name in reference.rooms(libraries)]
    return [*found, {"Reference": [{"All rooms": "docs/reference/README.md"}, *rooms]}]


def _plain(title: str) -> str:
    """A link's text, for a menu: its first letter large, no marks of code."""
    title = title.replace("`", "")
    return title[:1].upper() + title[1:]


def _place(path: str) -> str:
    return str((DOCS / path).resolve().relative_to(ROOT))


def configuration(libraries: bool = False) -> str:
    """docs/zensical.toml with the navigation in it."""
    base = (DOCS / "zensical.toml").read_text(encoding="utf-8")
    pages = ", ".join(_toml(each) for each in [{"All pages": "docs/README.md"}, *navigation(libraries)])
    return base.replace("[project]\n", f"[project]\nnav = [{pages}]\n", 1)


def _toml(entry: dict[str, object]) -> str:
    """{"title": "path" or entries} as TOML's inline table."""
    ((title, place),) = entry.items()
    inner = f"[{', '.join(map(_toml, place))}]" if isinstance(place, list) else json.dumps(place)
    return f"{{ {json.dumps(title, ensure_ascii=False)} = {inner} }}"


def main() -> int:
    """Build docs/_build/site; the exit code is zensical's."""
    build = DOCS / "_build"
    shutil.rmtree(build, ignore_errors=True)
    lay_out(build / "pages", libraries=True)
    config = build / "zensical.toml"
    config.write_text(configuration(libraries=True), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    return subprocess.run(command, cwd=build, check=False).returncode


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(main())
