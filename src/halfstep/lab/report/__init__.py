"""Reports: what the files of a run folder say, as summary.json, plots and one page. Imports no torch."""

from halfstep.lab.report.page import write_report
from halfstep.lab.report.results import summarize


__all__ = ["summarize", "write_report"]
