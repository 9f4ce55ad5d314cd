"""The documentation cannot go stale: commands run, generated parts are as generated, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

NOT_RUN_HERE = {"make demo", "make test"}  # CI is `make test`; `make demo` is `benchkit demo`, which is run below
SLOW = {"benchkit demo --real"}  # run by tests/llamacpp


def commands(page: Path) -> list[str]:
    """The `$ …` lines of a page, without their comments, in order."""
    out = []
    for language, body in FENCE.findall(page.read_text()):
        if language == "console":
            out += [line[2:].split("  #")[0].strip() for line in body.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s+#.*$", "", c) for c in out]


def files(page: Path) -> dict[str, str]:
    """The TOML files that a page shows with their name in the first line."""
    found = {}
    for language, body in FENCE.findall(page.read_text()):
        first = body.split("\n", 1)[0]
        if language == "toml" and re.fullmatch(r"# \S+\.toml", first):
            found[first[2:]] = body
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder with the files that the README speaks of; background commands end with the test."""
    for name, text in files(ROOT / "README.md").items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "nvfp4.toml").write_text(
        (tmp_path / "w4a16.toml")
        .read_text()
        .replace("w4a16", "nvfp4")
        .replace("W4A16", "NVFP4")
        .replace("8001", "8002")
    )
    (tmp_path / "CARD.md").write_text("# A card\n\n<!-- benchkit:table headline -->\n<!-- /benchkit -->\n")
    yield tmp_path


def run(line: str, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, cwd=place, shell=True, text=True, capture_output=True, env=environment(), timeout=170)


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def wait_for(port: str) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}")


def test_every_command_of_the_readme_and_the_docs_runs(place: Path) -> None:
    """In one folder, in order; the README's session is what the docs' commands then look at."""
    servers: list[subprocess.Popen[bytes]] = []
    ran: set[str] = set()
    try:
        for page in PAGES:
            for line in commands(page):
                if line in NOT_RUN_HERE | SLOW or line in ran:
                    continue
                ran.add(line)
                if line.endswith("&"):
                    argv = shlex.split(line.removesuffix("&"))
                    servers.append(subprocess.Popen(argv, cwd=place, env=environment(), stdout=subprocess.DEVNULL))
                    wait_for(argv[argv.index("--port") + 1])
                    continue
                done = run(line, place)
                assert 0 == done.returncode, f"{page.name}: {line}\n{done.stdout}\n{done.stderr}"
    finally:
        for server in servers:
            server.terminate()
            server.wait()
    assert len(ran) >= 12
    card = (place / "CARD.md").read_text()
    assert "W4A16 against NVFP4" in card
    assert "± " in card


def test_make_has_the_targets_that_the_readme_names() -> None:
    text = (ROOT / "Makefile").read_text()

    assert all(re.search(rf"^{line.split()[1]}:", text, re.MULTILINE) for line in NOT_RUN_HERE)
    assert set(commands(ROOT / "README.md")) >= NOT_RUN_HERE


def test_generated_parts_are_as_generated() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, text=True, capture_output=True, check=False
    )

    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    "argv",
    [
        (), ("demo",), ("sim",), ("run",), ("protocols",), ("bank",), ("quarantine",), ("waive",), ("runs",), ("show",),
        ("log",), ("compare",), ("table",), ("readme",), ("verify",), ("ledger",), ("ledger", "rebuild"),
        ("ledger", "merge"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_has_help(argv: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchkit", *argv, "--help"], text=True, capture_output=True, check=True
    )

    assert "Usage: " in done.stdout
    assert "benchkit" in done.stdout
