"""Build the release files, check them, and run the tests against the wheel without the source tree.

`make release` does so in two fresh environments: one with the lowest versions that pyproject.toml allows of what
halfstep and its extras need, the other with the newest. Everything is written to dist/. --quick runs a few rooms
instead of all fast tests; --only takes one environment, or just the files. torch's default wheel for Linux brings
gigabytes of CUDA: PIP_FLAGS chooses another index, and a torch that needs CUDA's libraries is rejected unless --cuda is
given. uv resolves and installs the libraries, in seconds where pip fetches whole wheels for their metadata."""

from __future__ import annotations

import argparse
import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version


ROOT = Path(__file__).parents[1]
OUT = ROOT / "dist"
ROOMS = ("test_prepare.py", "formats", "kb", "recipe", "quant/test_round_exactly.py", "cli/test_without_extras.py")
ASIDE = ("dev", "bench", "site", "gpu")
"""Extras whose lower bounds are not pinned: a torch for CUDA needs its own triton."""

WITHOUT = {"lowest": ("torchao",)}
"""Packages that an environment lacks. PEFT 0.18 imports names that torchao 0.18 no longer has."""


def project() -> dict[str, Any]:
    """The `project` table of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def lowest(project: dict[str, Any], extras: Iterable[str]) -> list[str]:
    """Constraints that pin every library, including the extras', to its lower bound (the highest of several).

    >>> extras = {"hf": ["transformers>=5.0"], "trainer": ["transformers>=5.8"]}
    >>> lowest({"dependencies": ["torch>=2.10,<2.16"], "optional-dependencies": extras}, extras)
    ['torch==2.10', 'transformers==5.8']
    """
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    bounds: dict[str, Version] = {}
    for match in filter(None, (re.match(r"([\w.-]+)>=([\w.]+)", line) for line in lines)):
        bounds[match[1]] = max(Version(match[2]), bounds.get(match[1], Version("0")))
    return [f"{name}=={version}" for name, version in bounds.items()]


def wheel_mistakes(names: Sequence[str], metadata: str, sources: Iterable[str], project: dict[str, Any]) -> list[str]:
    """What is wrong with a wheel, from its member names, METADATA, and the package's files (`halfstep/...`).

    The wheel must hold every file of the package, including data and py.typed, the license, and nothing else.
    """
    members, sources = set(names), set(sources)
    inside = {name for name in members if ".dist-info/" not in name}
    headers = email.message_from_string(metadata)
    wanted = {
        "Name": project["name"],
        "Version": project["version"],
        "License-Expression": project["license"],
        "Requires-Python": project["requires-python"],
    }
    extras = {*project["optional-dependencies"]}
    return [
        *(f"the wheel lacks {name}" for name in sorted(sources - inside)),
        *(f"the wheel has {name}, which is no file of the package" for name in sorted(inside - sources)),
        *([] if any(name.endswith(".dist-info/licenses/LICENSE") for name in members) else ["the wheel lacks LICENSE"]),
        *(f"{key} is {headers[key]}, expected {value}" for key, value in wanted.items() if headers[key] != value),
        *(
            f"the extra {extra} is not in the metadata"
            for extra in sorted(extras - {*headers.get_all("Provides-Extra", [])})
        ),
        *([] if len(headers.get_payload()) > 500 else ["the metadata hold no README"]),
    ]


def sdist_mistakes(names: Iterable[str], sources: Iterable[str]) -> list[str]:
    """What is wrong with a source distribution, from its member names without the top folder."""
    members = set(names)
    wanted = {*(f"src/{name}" for name in sources), "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"}
    more = members - wanted - {"PKG-INFO", ".gitignore", ""}
    return [
        *(f"the source distribution lacks {name}" for name in sorted(wanted - members)),
        *(f"the source distribution has {name}" for name in sorted(more)),
    ]


def named(texts: Iterable[tuple[str, bytes]], paths: Iterable[Path]) -> list[str]:
    """Files that contain a path of this machine."""
    found = [(name, path) for name, text in texts for path in paths if str(path).encode() in text]
    return [f"{name} names {path}, a path of this machine" for name, path in found]


def check(wheel: Path, sdist: Path) -> list[str]:
    """What is wrong with the wheel and the source distribution."""
    sources = [name.removeprefix("src/") for name in tracked() if name.startswith("src/")]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        texts = [(name, archive.read(name)) for name in names]
    metadata = next(text for name, text in texts if name.endswith(".dist-info/METADATA")).decode()
    with tarfile.open(sdist) as tar:
        packed = [member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()]
    return [
        *wheel_mistakes(names, metadata, sources, project()),
        *sdist_mistakes(packed, sources),
        *named(texts, [ROOT]),
    ]


def tracked() -> list[str]:
    """The files tracked by git."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Print and run a command; exit if it fails."""
    print("+", shlex.join(map(str, command)), flush=True)
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if subprocess.run(list(map(str, command)), cwd=cwd, env=own).returncode:
        sys.exit(f"release: this failed: {shlex.join(map(str, command))}")


def fresh(name: str) -> Path:
    """The Python of a new environment in dist/."""
    venv.create(OUT / name, with_pip=True, clear=True)
    return OUT / name / "bin" / "python"


def build() -> tuple[Path, Path]:
    """Build a wheel and a source distribution of the clone, with twine's own checks."""
    python = fresh("build")
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    run(python, "-m", "pip", "install", "--quiet", *backend, "twine", "uv")
    for old in [*OUT.glob("*.whl"), *OUT.glob("*.tar.gz")]:
        old.unlink()
    run(python, "-m", "hatchling", "build", "-d", OUT)
    (wheel,), (sdist,) = OUT.glob("*.whl"), OUT.glob("*.tar.gz")
    run(python, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel, sdist


def install(
    python: Path, wheel: Path, constraints: Sequence[str], without: Sequence[str], flags: Sequence[str], cuda: bool
) -> None:
    """Install the wheel with its extras and the tests' references, unless that would bring CUDA unasked."""
    place, uv = python.parent, OUT / "build" / "bin" / "uv"
    (place / "wanted.txt").write_text(f"halfstep[dev] @ {wheel.as_uri()}\n")
    (place / "constraints.txt").write_text("\n".join(constraints) + "\n")
    # As pip does with several indexes: the best version of any.
    common = ["--quiet", "--python", python, "--index-strategy", "unsafe-best-match", *flags]
    files = [place / "wanted.txt", "-c", place / "constraints.txt"]
    plan = subprocess.run([uv, "pip", "compile", *common, *files], capture_output=True, text=True)
    if plan.returncode:
        sys.exit(f"release: there is no such set of libraries:\n{plan.stderr}")
    nvidia = re.findall(r"^nvidia-", plan.stdout, re.MULTILINE)
    if nvidia and not cuda:
        sys.exit(
            f"release: torch wants {len(nvidia)} libraries of CUDA; choose an index with PIP_FLAGS, or give --cuda"
        )
    lines = [line for line in plan.stdout.splitlines() if line.partition("==")[0] not in without]
    (place / "all.txt").write_text("\n".join(lines) + "\n")
    run(uv, "pip", "install", "--no-deps", *common, "-r", place / "all.txt")


def suite(python: Path, paths: Sequence[str], name: str) -> None:
    """Run the fast tests against the wheel, in a copy of the clone without src/."""
    clone = OUT / f"{name}-tests"
    shutil.rmtree(clone, ignore_errors=True)
    clone.mkdir()
    for file in tracked():
        if not file.startswith("src/"):
            (clone / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, clone / file)
    where = "import halfstep, sys; print(halfstep.__file__); sys.exit('site-packages' not in halfstep.__file__)"
    run(python, "-c", where, cwd=clone)
    run(python, "-m", "pip", "list", "--format", "freeze", cwd=clone)
    tests = [f"tests/{path}" for path in paths] or ["tests"]
    # Arbitrary versions of libraries warn of each other, so warnings, errors with pinned versions, are only shown.
    options = ["-o", "filterwarnings=default", "-n", "logical", "--dist", "worksteal"]
    run(python, "-m", "pytest", *options, *tests, cwd=clone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"run {', '.join(ROOMS)} alone")
    parser.add_argument("--only", choices=["files", "lowest", "newest"], help="the files alone, or one environment")
    parser.add_argument(
        "--pip-flags", default="", help="given to uv, which knows pip's --index-url, --extra-index-url and --find-links"
    )
    parser.add_argument("--cuda", action="store_true", help="take a torch that brings CUDA's libraries")
    given = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    wheel, sdist = build()
    if mistakes := check(wheel, sdist):
        sys.exit("\n".join(["release:", *mistakes]))
    print(f"{wheel.name} and {sdist.name}: as they should be", flush=True)
    extras = [name for name in project()["optional-dependencies"] if name not in ASIDE]
    for name, constraints in (("lowest", lowest(project(), extras)), ("newest", [])):
        if given.only in (None, name):
            python = fresh(name)
            install(python, wheel, constraints, WITHOUT.get(name, ()), shlex.split(given.pip_flags), given.cuda)
            suite(python, ROOMS if given.quick else (), name)


if __name__ == "__main__":
    main()
