"""A comparison, or one run, as a page, as Markdown and as JSON.

Reads JSON only, and needs neither torch nor the network. No module of this package may be called
`page`, `markdown`, `read`, `render` or `write`: it would replace the function of that name.
"""

from halfstep.report.html_page import page
from halfstep.report.load import read
from halfstep.report.markdown_report import markdown
from halfstep.report.write_report import render, write

__all__ = ["markdown", "page", "read", "render", "write"]
