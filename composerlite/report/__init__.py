"""The report of a run: what its record and its checkpoints tell, as facts and as a page. Nothing here imports torch."""

from composerlite.report.facts import Facts, facts_of, to_plain
from composerlite.report.page import page_of
from composerlite.report.summary import sentences

__all__ = ["Facts", "facts_of", "page_of", "sentences", "to_plain"]
