"""The signed dynamic map over all float32 quotients in [-1, 1]: a code has the quotient's sign or decodes to 0.

python tests/exhaustive/signs.py [--every N]
"""

import argparse
import json

import numpy as np
import torch

from halfstep import formats
from halfstep.quant import encode


CHUNK = 1 << 23
ONE = 127 << 23
"""The bits of 1.0."""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    every = parser.parse_args().every
    dynamic = formats.get("dynamic8")
    values = torch.tensor([dynamic.decode(code) for code in dynamic.codes()], dtype=torch.float64)
    zeros, changed = {"positive": 0, "negative": 0}, 0
    for start in range(0, ONE + 1, CHUNK * every):
        x = torch.arange(start, min(start + CHUNK * every, ONE + 1), every, dtype=torch.int32).view(torch.float32)
        for name, signed in (("positive", x), ("negative", -x)):
            found = values[encode(signed, dynamic).long()]
            zeros[name] += int(((found == 0) & (signed != 0)).sum())
            changed += int((np.sign(found.numpy()) * np.sign(signed.double().numpy()) < 0).sum())
    print(json.dumps({"signs changed": changed, "not 0, rounded to 0": zeros}))
    assert changed == 0, "a code has another sign than its quotient"


if __name__ == "__main__":
    main()
