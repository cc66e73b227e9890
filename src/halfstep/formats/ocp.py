"""The 8-, 6- and 4-bit floating-point formats: those of the Open Compute Project, and 8-bit ones with other rules."""

from halfstep.formats.floating import Float, ieee


_OFP8 = "OCP 8-bit Floating Point Specification (OFP8) 1.0"
_MX = "OCP Microscaling Formats (MX) 1.0"
_NOUNE = "Noune et al. 2022, arXiv 2206.02915"
_XLA = "ml_dtypes (XLA)"

float8_e4m3fn = Float("float8_e4m3fn", 4, 3, 7, "fn", source=_OFP8, aliases=("e4m3fn", "fp8_e4m3"))
float8_e5m2 = ieee("float8_e5m2", 5, 2, _OFP8, aliases=("e5m2", "fp8_e5m2"))

float8_e4m3 = ieee("float8_e4m3", 4, 3, _XLA, aliases=("e4m3",))
float8_e3m4 = ieee("float8_e3m4", 3, 4, _XLA, aliases=("e3m4",))
float8_e4m3fnuz = Float("float8_e4m3fnuz", 4, 3, 8, "fnuz", source=_NOUNE, aliases=("e4m3fnuz",))
float8_e5m2fnuz = Float("float8_e5m2fnuz", 5, 2, 16, "fnuz", source=_NOUNE, aliases=("e5m2fnuz",))
float8_e4m3b11fnuz = Float("float8_e4m3b11fnuz", 4, 3, 11, "fnuz", source=_XLA, aliases=("e4m3b11fnuz",))

float6_e3m2fn = Float("float6_e3m2fn", 3, 2, 3, "finite", source=_MX, aliases=("e3m2fn", "e3m2", "fp6_e3m2"))
float6_e2m3fn = Float("float6_e2m3fn", 2, 3, 1, "finite", source=_MX, aliases=("e2m3fn", "e2m3", "fp6_e2m3"))
float4_e2m1fn = Float(
    "float4_e2m1fn", 2, 1, 1, "finite", source=_MX, aliases=("e2m1fn", "e2m1", "fp4_e2m1", "fp4", "float4_e2m1fn_x2")
)
