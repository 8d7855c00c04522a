"""A comparison, or one run, as a page, as Markdown and as JSON. Reads JSON only: no network, no training."""

from halfstep.report.load import read
from halfstep.report.markdown import markdown
from halfstep.report.page import page
from halfstep.report.page__write import render, write

__all__ = ["markdown", "page", "read", "render", "write"]
