"""`halfstep audit`: run an unchanged training script, and report which of its updates are lost."""

import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.terminal import write_text
from halfstep.errors import HalfstepError, RunError


if TYPE_CHECKING:
    from halfstep.auditing import Running

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Options after the script belong to the script."""

_STARTERS = {"torchrun": "torchrun", "accelerate": "accelerate launch", "deepspeed": "deepspeed"}


class _Enough(BaseException):
    """Ends the script. A BaseException, so that no `except Exception` of the script catches it."""


def audit(
    script: Annotated[list[str], typer.Argument(help="A script and its arguments; `python train.py ...` works too.")],
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as after `python -m`.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to check; then the script is stopped.")] = 10,
    whole: Annotated[
        bool, typer.Option("--whole", help="Let the script run to its end, and check every step.")
    ] = False,
    save: Annotated[str | None, typer.Option(help="Write the report to this file as JSON, too.")] = None,
) -> None:
    """Run SCRIPT for a few steps: which share of its updates is lost, what it stores in which dtype, and how to fix it.

    The script is not changed, and does not need halfstep. Exit code: 1 if updates are lost, else 0.
    """
    words, as_module = _without_python(script, module)
    if save is not None and not Path(save).parent.is_dir():
        raise RunError(f"cannot write {save!r}: its folder does not exist; name one that does")
    reports = _run_watched(_program(words, as_module), None if whole else steps)
    if save is not None:
        import json

        write_text(Path(save), json.dumps([report.to_dict() for report in reports], indent=2) + "\n", RunError)
    if reports:
        print("\n\n".join(map(str, reports)))
    raise typer.Exit(int(any(report.loses for report in reports)))


def _without_python(words: list[str], module: bool) -> tuple[list[str], bool]:
    """The script with its arguments, without a leading `python` and its options, and whether the script is a module.

    Raises:
        RunError: the program starts other processes, or an option of Python is unknown.
    """
    first = Path(words[0]).name
    if first in _STARTERS:
        rest = words[1 + (words[1:2] == ["launch"]) :]
        raise RunError(
            f"{first} starts other processes, which this audit cannot see; audit each of them: "
            f"{_STARTERS[first]} -m halfstep audit {' '.join(rest)}"
        )
    if module or not first.startswith("python"):
        return words, module
    rest = words[1:]
    while rest and rest[0] in ("-u", "-O", "-s", "-E"):
        rest = rest[1:]
    if rest and rest[0] == "-m":
        rest, module = rest[1:], True
    if not rest or rest[0].startswith("-"):
        raise RunError(
            f"{' '.join(words)}: no script after {words[0]}; expected halfstep audit train.py [ARGUMENTS], or "
            "halfstep audit -m package.train [ARGUMENTS]"
        )
    return rest, module


def _program(words: list[str], module: bool) -> Callable[[], None]:
    """A function that runs the script as `python` would.

    Raises:
        RunError: there is no such file.
    """
    name = words[0]
    if not module and not Path(name).is_file():
        hint = f", or the module: halfstep audit -m {name}" if not name.endswith(".py") else ""
        raise RunError(f"{name!r} is no file; expected a Python script{hint}")

    def run() -> None:
        sys.argv = list(words)
        sys.path[0:0] = [str(Path.cwd()) if module else str(Path(name).resolve().parent)]
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")

    return run


def _run_watched(program: Callable[[], None], steps: int | None) -> "tuple[Running, ...]":
    """The reports of a program's steps; empty on ranks other than 0.

    Raises:
        RunError: the program took no optimizer step.
    """
    from halfstep.auditing import Watch, running

    def enough() -> None:
        raise _Enough

    code: str | int | None = None
    with Watch(steps, enough) as watch:
        try:
            program()
        except _Enough:
            pass
        except SystemExit as ended:
            code = ended.code
        except HalfstepError:
            raise
        except Exception:
            traceback.print_exc()
            code = 1
    if code and not watch.steps:
        raise typer.Exit(code if isinstance(code, int) else 1)
    return running(watch) if _first_rank() else ()


def _first_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
