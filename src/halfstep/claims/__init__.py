"""The ledger: claims of papers and forums, measured again. Imports no torch; checks/ and run.py measure."""

from halfstep.claims.claim import VERDICTS, Claim, Number, Reference, get_claim, load


__all__ = ["VERDICTS", "Claim", "Number", "Reference", "get_claim", "load"]
