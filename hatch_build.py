"""README.md as the package's description: with absolute links, because a package index has none of the files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#|mailto:)([^)\s]+)\)")
_SOURCE = re.compile(r"""(<(?:img|source)[^>]*?\s(?:src|srcset)=")(?!https?://)([^"]+)""")


def absolute(text: str, repository: str) -> str:
    """Links to files of the repository by their addresses there; pictures by that of their bytes."""
    raw = f"{repository.replace('github.com', 'raw.githubusercontent.com')}/main"
    text = _SOURCE.sub(lambda found: f"{found[1]}{raw}/{found[2]}", text)
    return _LINK.sub(
        lambda found: f"{found[1]}{found[2]}({raw if found[1] else f'{repository}/blob/main'}/{found[3]})",
        text,
    )


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        readme = absolute(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
