"""The hook of mkdocs.yml: links from docs/ to other files of the repository become links to where it is published."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def outside(link: re.Match[str]) -> str:
        target = os.path.relpath((folder / link[0]).resolve(), ROOT)
        return link[0] if target.startswith("docs/") else f"{config.repo_url.rstrip('/')}/tree/main/{target}"

    return LINK.sub(outside, markdown)
