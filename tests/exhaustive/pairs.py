"""All pairs (w, c) of finite bfloat16 values through one compensated addition: masters must keep every remainder.

w' = w + c and c' = c + (w - w'), each operation rounded, is how Kahan's compensation and Collage's residual arise
(`quant.masters`). Also splits all 2^32 float32 values into a bfloat16 and its remainder, as masters start. Takes half
an hour.

    python tests/exhaustive/pairs.py [--every N]
"""

import argparse

import torch

from halfstep.ops import follow
from halfstep.quant.masters import get_master


def dropped(weight: torch.Tensor, rest: torch.Tensor) -> int:
    """The number of remainders that a Kahan master does not keep, for finite weights and remainders."""
    kept = {"compensation": rest.clone()}
    follow(get_master("kahan"), weight, kept)
    sound = weight.isfinite() & rest.isfinite()
    return int((sound & (kept["compensation"] != rest)).sum())


def main() -> None:
    """Count dropped remainders; there must be none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try every Nth weight only")
    every = parser.parse_args().every
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    added = codes[codes.isfinite()]
    lost = 0
    for high in added[::every]:
        moved = high + added
        lost += dropped(moved, added + (high - moved))
        full = (high.view(torch.int16).int() << 16) + torch.arange(2**16, dtype=torch.int32)
        numbers = full.view(torch.float32)
        lost += dropped(numbers.bfloat16(), (numbers - numbers.bfloat16().float()).bfloat16())
    print(f"{len(added[::every])} weights x {len(added)} additions and 65536 lower halves: {lost} dropped")
    raise SystemExit(lost > 0)


if __name__ == "__main__":
    main()
