"""Reports: what the files of a run folder say, as summary.json, plots and one page. Imports no torch."""

from halfstep.lab.report.page import write_report


__all__ = ["write_report"]
