"""The 8-bit floating-point formats of the Open Compute Project."""

from halfstep.formats.base import Format, ieee


_OFP8 = "OCP 8-bit Floating Point Specification (OFP8) 1.0"

float8_e4m3fn = Format("float8_e4m3fn", 4, 3, bias=7, max=448.0, has_infinity=False, source=_OFP8, aliases=("e4m3fn",))
float8_e5m2 = ieee("float8_e5m2", 5, 2, _OFP8, aliases=("e5m2",))
