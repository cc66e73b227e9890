"""In which precision was this model pre-trained? A sourced knowledge base. Imports no torch and no numpy."""

from halfstep.kb.reader import DEFAULT_OVERLAY, Entry, FailureReport, KnowledgeBase, Reference, load
from halfstep.kb.resolve import Answer, lookup, search
from halfstep.kb.verdict import Reason, Verdict, check


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
