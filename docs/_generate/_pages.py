"""What the generators of pages share: write a page, or say that the one in the repository is out of date."""

import sys
from pathlib import Path


def write_or_check(path: Path, text: str, source: str) -> int:
    """Write ``text``, or with ``--check`` compare it, made of ``source``. Return an exit code."""
    if "--check" not in sys.argv[1:]:
        path.write_text(text, encoding="utf-8")
        return 0
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        print(f"{'/'.join(path.parts[-3:])} is not what {source} say; run `make docs` and commit it", file=sys.stderr)
        return 1
    return 0
