"""The computations behind the ledger's short rows, one object each; `python -m halfstep.claims.checks ID` runs one."""
