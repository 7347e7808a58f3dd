"""Hooks of the documentation's site: built pages, pages of the repository's root, and links to files outside docs/.

mkdocs.yml names this file. In a page the line `<!-- built: NAME -->` becomes what the function NAME of
`tools.docs_reference` returns.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tools.docs_reference import BUILT

ROOT = Path(__file__).parents[1]
# Of the repository's root, as pages of the site.
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
_BUILT = re.compile(r"^<!-- built: (\w+) -->$", re.MULTILINE)
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]\n]*(?:\n[^\]\n]*)?)\]\(([^)\s#]+)(#[\w-]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    folder = posixpath.dirname(here if here in ROOT_PAGES else f"docs/{here}")
    files_at = config.extra.get("files")

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in ROOT_PAGES or path.startswith("docs/"):
            return f"[{text}]({posixpath.relpath(path.removeprefix('docs/'), posixpath.dirname(here) or '.')}{anchor})"
        return f"[{text}]({files_at.rstrip('/')}/{path}{anchor})" if files_at else text

    markdown = _BUILT.sub(lambda mark: BUILT[mark[1]](), markdown)
    parts = _FENCED.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)
