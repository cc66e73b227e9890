"""`halfstep formats`: the number formats. Imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli.terminal import show_json, show_table


def formats(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the number formats: bits, range, precision, source."""
    from halfstep import formats as room

    members = [room.get(name) for name in room.names()]
    if as_json:
        show_json(
            [
                {
                    "name": f.name,
                    "aliases": list(f.aliases),
                    "bits": f.bits,
                    "exponent_bits": f.exponent_bits,
                    "mantissa_bits": f.mantissa_bits,
                    "max": f.max,
                    "min_normal": f.min_normal,
                    "min_subnormal": f.min_subnormal,
                    "eps": f.eps,
                    "has_infinity": f.has_infinity,
                    "source": f.source,
                }
                for f in members
            ]
        )
        return
    numbers = ["bits", "exp", "man", "max", "min normal", "min subnormal", "eps"]
    show_table(
        ["format", *numbers, "inf", "also"],
        [
            (
                f.name,
                str(f.bits),
                str(f.exponent_bits),
                str(f.mantissa_bits),
                f"{f.max:.6g}",
                f"2^{f.min_exponent}",
                f"2^{f.min_exponent - f.mantissa_bits}",
                f"2^{-f.mantissa_bits}",
                "yes" if f.has_infinity else "no",
                ", ".join(f.aliases),
            )
            for f in members
        ],
        right=numbers,
    )
