"""Everything about the distribution is in pyproject.toml, but the text that a package index shows: README.md, with its
links made absolute, since an index page has no other files beside it."""

import re
import tomllib
from pathlib import Path

import setuptools

root = Path(__file__).parent
source = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Source"]
readme = re.sub(r"\]\((?![a-z]+:|#)", f"]({source}/blob/main/", (root / "README.md").read_text())
setuptools.setup(long_description=readme, long_description_content_type="text/markdown")
