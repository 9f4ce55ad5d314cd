"""Writes the parts of the documentation that the source already says: glossary, flags, module list.

python docs/generate.py          writes them between their marks
python docs/generate.py --check  exit 1 if a page is not as it would be written
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from benchkit.metrics import GLOSSARY
from benchkit.sim.profile import describe_keys
from benchkit.validity import FLAGS

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "benchkit"


def glossary() -> str:
    """Every metric: name, unit, which way is better, formula."""
    rows = ["| metric | unit | better | formula |", "| --- | --- | --- | --- |"]
    for metric in GLOSSARY.values():
        name = f"`{metric.name}`" + (" *" if metric.per_request else "")
        rows.append(f"| {name} | {metric.unit or '—'} | {metric.better or '—'} | {metric.formula} |")
    return "\n".join(rows)


def flags() -> str:
    """Every flag: what it does to banking, and what it means."""
    rows = ["| flag | effect | means |", "| --- | --- | --- |"]
    return "\n".join(rows + [f"| `{name}` | {effect} | {meaning} |" for name, (effect, meaning) in FLAGS.items()])


def modules() -> str:
    """Every module with the first sentence of its docstring."""
    rows = ["| module | what it is for |", "| --- | --- |"]
    for path in sorted(SOURCE.rglob("*.py")):
        says = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if says is None:
            raise SystemExit(f"{path}: no docstring")
        name = path.relative_to(SOURCE).as_posix()
        first = says.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{name}` | {first} |")
    return "\n".join(rows)


def profile() -> str:
    """Every key of the simulator's profile."""
    return f"```text\n{describe_keys()}\n```"


PARTS = {"glossary": glossary, "flags": flags, "modules": modules, "profile": profile}


def generated(text: str) -> str:
    """A page's text with every marked part written anew."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- generated:{match[1]} -->\n{PARTS[match[1]]()}\n<!-- /generated -->"

    return re.sub(r"<!-- generated:(\w+) -->\n.*?<!-- /generated -->", part, text, flags=re.DOTALL)


def main() -> int:
    """Writes the pages, or says which are stale."""
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = generated(old)
        if old != new:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale)}" if stale else "nothing to write")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
