"""In which precision was this model pre-trained? A sourced knowledge base. Imports no torch and no numpy."""

from halfstep.kb.check import Reason, Verdict, check
from halfstep.kb.entry import Entry, FailureReport, Reference
from halfstep.kb.load import DEFAULT_OVERLAY, KnowledgeBase, load
from halfstep.kb.lookup import Answer, lookup, search


__all__ = [
    "DEFAULT_OVERLAY",
    "Answer",
    "Entry",
    "FailureReport",
    "KnowledgeBase",
    "Reason",
    "Reference",
    "Verdict",
    "check",
    "load",
    "lookup",
    "search",
]
