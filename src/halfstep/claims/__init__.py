"""Claims of papers and forums, measured again: the ledger. Imports no torch; what measures is in checks/ and run.py."""

from halfstep.claims.claim import VERDICTS, Claim, Number, Reference, get_claim, load


__all__ = ["VERDICTS", "Claim", "Number", "Reference", "get_claim", "load"]
