"""The description on PyPI: README.md with links that lead somewhere there.

In the repository the links are relative, so that they work in every clone and branch. PyPI shows
the page alone; there they begin with the address of the source. All else is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FILES = PROJECT["urls"]["Source"] + "/blob/main/"

# "](" and what is no address and no place on the same page.
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)")

setup(
    long_description=RELATIVE_LINK.sub(f"]({FILES}", (ROOT / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
)
