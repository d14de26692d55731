"""Collect facts about a run from its record and its checkpoints, and render an HTML page. Does not import torch."""

from composerlite.report.facts import Facts, collect_facts, to_json
from composerlite.report.page import render_page
from composerlite.report.summary import summarize

__all__ = ["Facts", "collect_facts", "render_page", "summarize", "to_json"]
