"""What the pages say of names, versions and extras is what the code says, everywhere; links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import hal
from hal import _env
from hal.ops import BUILTIN
from hal.registry import API
from hal.registry._discover import BUILTIN as BACKENDS

ROOT = Path(hal.__file__).parents[1]
if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("no checkout here", allow_module_level=True)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
SOURCES = [p for d in ("hal", "registry", "backends") for p in (ROOT / d).rglob("*.py")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def shown(pattern: str, paths: list[Path]) -> dict[str, list[str]]:
    """What matches, by file."""
    found = {p.relative_to(ROOT).as_posix(): re.findall(pattern, p.read_text("utf-8")) for p in paths}
    return {p: texts for p, texts in found.items() if texts}


def test_every_public_name_is_on_the_api_page() -> None:
    docs_api = pytest.importorskip("docs_api")
    assert docs_api.missing() == set()
    page = (ROOT / "docs/api.md").read_text("utf-8")
    for name in {*hal.__all__} - {*BUILTIN} - {"__version__"}:
        assert f"\n### `hal.{name}`\n" in page, name
    assert "SlotAllocator.alloc(tokens: int) -> Tensor" in page


def test_every_variable_has_a_section_and_no_other_is_read() -> None:
    page = (ROOT / "docs/environment.md").read_text("utf-8")
    assert re.findall(r"^## (\w+)$", page, re.M) == [*_env.VARIABLES]
    for name, choices in {**_env.CHOICES, **_env.LISTS}.items():
        told = page + _env.VARIABLES[name]
        assert all(re.search(rf"\b{c}\b", told) for c in choices), name
    read = shown(r"[\"'`](HAL_[A-Z]+(?:_[A-Z]+)*)\b", [*SOURCES, *PAGES])
    assert {n for names in read.values() for n in names} == {*_env.VARIABLES}


def test_the_defaults_are_those_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    docs_api = pytest.importorskip("docs_api")
    for name in _env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    hal.reload()
    for told in hal.info()["environment"]:
        if told["name"] != "HAL_CACHE_DIR" and told["source"] == "default":
            default = docs_api.default(told["name"]).strip("`")
            assert default == {"0": "off"}.get(told["value"], told["value"]), told["name"]
    monkeypatch.undo()
    hal.reload()


def test_extras_are_the_projects() -> None:
    extras = PROJECT["optional-dependencies"]
    used = shown(r"(?:hal-kernels|whl|'\.|\"\.|\.)\[([a-z,]+)\]", [*PAGES, *SOURCES, ROOT / "ci/setup"])
    assert {"README.md", "ci/setup", "hal/bench/plot.py"} <= {*used}
    # `test` is that of the package which `hal new-backend` writes.
    assert {n for texts in used.values() for text in texts for n in text.split(",")} <= {*extras, "test"}
    table = (ROOT / "README.md").read_text("utf-8").partition("| extra | for |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(extras)
    for backend, module in BACKENDS.items():
        extra = __import__(module, fromlist=["hal_backend"]).hal_backend().extra
        assert not extra or extra in extras, backend


def test_versions_of_python_and_torch() -> None:
    low = PROJECT["requires-python"].removeprefix(">=")
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"Python {low} or later" in readme
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert ruff["target-version"] == "py" + low.replace(".", "")
    examples = [*ROOT.glob("examples/**/pyproject.toml")]
    assert {v for vs in shown(r'requires-python = ">=([\d.]+)"', examples).values() for v in vs} <= {low}
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    named = [v for vs in shown(r"Python (?:\| )?(3\.\d+)(?!\.)", PAGES).values() for v in vs]
    for version in [*classifiers, *named]:
        assert int(version.partition(".")[2]) >= int(low.partition(".")[2]), version
    torch = next(d for d in PROJECT["dependencies"] if d.startswith("torch"))
    first, after = re.findall(r"2\.(\d+)", torch)
    assert f"torch 2.{first} to 2.{int(after) - 1}" in readme
    pin = re.search(r"^torch==.*$", (ROOT / "ci/constraints.txt").read_text(), re.M)
    assert pin is not None
    assert f"pip install {pin[0]} " in readme


def test_every_published_manifest_says_its_api() -> None:
    """`docs/compatibility.md` asks for it, so what is there to be copied does it."""
    manifests = [p for p in ROOT.glob("examples/**/__init__.py") if "def hal_backend" in p.read_text("utf-8")]
    texts = {p.as_posix(): p.read_text("utf-8") for p in manifests}
    for page in PAGES:
        blocks = re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        texts |= {f"{page.name} {i}": b for i, b in enumerate(blocks) if "def hal_backend" in b}
    assert len(texts) >= 5
    for where, text in texts.items():
        assert re.search(rf"api={API}\b|api=API \+ 1", text), where
    assert f"Backend(api={API}, ...)" in (ROOT / "docs/compatibility.md").read_text("utf-8")


def test_the_changelog_has_this_release() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    released = [h for h in headings if h != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(hal.__version__)} \(\d{{4}}-\d\d-\d\d\)", released[0])


def test_links_are_settled() -> None:
    text = pytest.importorskip("docs_text")
    page = "See [`x`](docs/api.md#a), ![p](docs/performance-cpu.png), [w](https://a.b), [h](#h).\n```\n[c](no)\n```\n"
    kept = text.relinked(page, "README.md", lambda path: f"https://host/{path}")
    assert kept == page.replace("(docs/", "(https://host/docs/")
    bare = text.relinked(page, "README.md", lambda path: None)
    assert bare.startswith("See `x`, p, [w](https://a.b), [h](#h).\n```\n[c](no)")
    up = text.relinked("[s](../../hal/cli.py)", "docs/ops/x.md", lambda path: path)
    assert up == "[s](hal/cli.py)"
    for link in ("docs/no.md", "../elsewhere"):
        with pytest.raises(ValueError, match="leads to nothing"):
            text.relinked(f"[a]({link})", "README.md", lambda path: path)


def test_metadata_with_a_relative_link_is_refused() -> None:
    """As ci/wheel looks at them."""
    names: dict[str, Any] = {"__name__": "hal_ci_wheel"}
    exec(compile((ROOT / "ci/wheel_check.py").read_text("utf-8"), "ci/wheel_check.py", "exec"), names)
    head = "Metadata-Version: 2.4\nName: a\nVersion: 1\nSummary: s\nKeywords: k\nClassifier: Typing :: Typed\n"
    good = head + "Description-Content-Type: text/markdown\n\n[a](https://b.c)\n```\n[a](b)\n```\n"
    assert names["described"](good.encode()) == []
    assert names["described"](good.replace("https://b.c", "docs/b.md").encode()) == [
        "the description has a relative link: docs/b.md"
    ]
    assert names["described"](good.replace("Keywords: k\n", "").encode()) == ["metadata: no keywords"]


@pytest.mark.parametrize(
    ("page", "more", "told"),
    [
        ("", "", ""),
        ("api.md", "[a](environment.md#no_such)", "does not contain an anchor '#no_such'"),
        ("api.md", "[a](no_such.md)", "docs/api.md: the link no_such.md leads to nothing"),
        ("orphan.md", "text", 'not included in the "nav"'),
    ],
    ids=["whole", "no such heading", "no such page", "a page that nothing leads to"],
)
def test_the_site_is_strict(page: str, more: str, told: str, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    if page:
        with (tmp_path / "docs" / page).open("a", encoding="utf-8") as file:
            file.write(f"\n{more}\n")
    here = f"docs_dir: docs\nsite_dir: site\nhooks: [{ROOT}/ci/mkdocs_hooks.py]\n"
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT}/mkdocs.yml\n{here}")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert (ran.returncode == 0) == (not page), ran.stderr
    assert told in ran.stderr
    if not page:
        start = (tmp_path / "site/index.html").read_text("utf-8")
        assert 'href="ops/rope_kv_write.html"' in start
        assert not re.search(r'href="(?:\.\./)*(?:hal|backends|docs)/', start)


def test_every_test_file_is_run_by_a_lane() -> None:
    """A lane names folders and files; what it leaves out by name is another lane's."""
    lines = [
        line
        for script in (ROOT / "ci").iterdir()
        if script.is_file() and not script.suffix and script.name != "h200"
        for line in script.read_text("utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    words = [w for line in lines for w in re.findall(r"(?<![=\w/])tests/[\w./{},*]+(?!\$)\b", line)]
    words += [f"tests/engines/test_{p.stem.removeprefix('engines-')}*.py" for p in ROOT.glob("ci/engines-*.txt")]
    bash = ["bash", "-c", f"printf '%s\\n' {' '.join(words)}"]
    named = subprocess.run(bash, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    lanes = {ROOT / name for name in named}
    assert [p for p in (ROOT / "tests").rglob("test_*.py") if not lanes & {p, *p.parents}] == []
