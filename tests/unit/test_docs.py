"""What the documentation names exists: modules, classes, functions, files, links, targets, extras, variables."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvdock
from kvdock.ops.catalog import CATALOG
from kvdock.ops.entry import OpEntry
from kvdock.plugins import settings
from support_docs import PAGES, ROOT, blocks, prose, read

ARCHITECTURE = Path("docs/architecture.md")
DOCUMENTS = Path("docs/from-the-documents.md")
USE = [
    Path("README.md"),
    *(Path(f"docs/{name}.md") for name in ("caches", "transformers", "prefix-and-scheduler", "command-line", "plugins")),
]
SOURCES = [*ROOT.glob("core/**/*.py"), *ROOT.glob("backends/*/**/*.py")]
MAKE_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WRITTEN = {"repro.py", "digest.md", "failures/"}
"""Files that commands write, and that are not in the repository."""

each_page = pytest.mark.parametrize("page", PAGES, ids=str)


def quoted(page: Path) -> Iterator[str]:
    """Yield what stands in backticks in the text of a page."""
    yield from re.findall(r"`([^`\n]+)`", prose(page))


def resolve(dotted: str) -> object:
    """Import a dotted name, as far as it is modules, and look up the rest."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


@cache
def defined() -> tuple[dict[str, set[str]], set[str]]:
    """Return the members of each class, those it inherits included, and the names of all functions and classes."""
    classes: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    names: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(members(node))
                bases.setdefault(node.name, []).extend(base.id for base in node.bases if isinstance(base, ast.Name))
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names.add(node.name)
    for name, parents in bases.items():
        classes[name] |= {member for parent in parents for member in classes.get(parent, ())}
    return classes, names


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield what a class defines: methods, fields, and what its methods assign to self."""
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child.attr


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)}


@each_page
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if heading:
            assert heading in anchors(path), f"{page} links to {target}, and there is no such heading"


@each_page
def test_dotted_names_can_be_imported(page: Path) -> None:
    for name in quoted(page):
        if re.fullmatch(r"kvdock(_\w+)?(\.\w+)+", name) and name != "kvdock.backends":  # that is the group of entry points
            resolve(name)


@each_page
def test_files_exist(page: Path) -> None:
    """A file is named from the root, from the page, from `core/kvdock` or the kit, or from a folder in the same paragraph or row."""
    described = theirs(page)
    for part in re.split(r"\n\s*\n|\n(?=[|*])", prose(page)):
        names = [name for name in re.findall(r"`([\w./-]+)`", part) if re.fullmatch(r"[\w./-]+(/|\.(py|md|toml|txt))", name)]
        parents = [ROOT, ROOT / page.parent, ROOT / "core" / "kvdock", ROOT / "core" / "kvdock_conformance"]
        parents += [parent / name for name in names if name.endswith("/") for parent in list(parents)]
        for name in names:
            assert name in described | WRITTEN or any((parent / name).exists() for parent in parents), f"{page} names {name}"


def theirs(page: Path) -> set[str]:
    """Return the files of other projects that the page on the documents names: those in its lines in italics."""
    return {name for line in re.findall(r"^\*Describes (.*)\*$", prose(page), re.MULTILINE) for name in re.findall(r"`([^`]+)`", line)}


@pytest.mark.parametrize("page", [*USE, ARCHITECTURE, Path("CONTRIBUTING.md"), Path("CHANGELOG.md")], ids=str)
def test_functions_and_methods_exist(page: Path) -> None:
    """`Class.method` and `function()` are names of the code, wherever they are defined."""
    classes, names = defined()
    for name in quoted(page):
        member = re.fullmatch(r"([A-Z]\w+)\.(\w+)", name)
        if member and member[1] in classes:
            assert member[2] in classes[member[1]], f"{page} names {name}"
        elif member:
            assert member[1] == "Role" or hasattr(kvdock, member[1]), f"{page} names {name}"
        called = re.fullmatch(r"(\w+)\(\)", name)
        if called and called[1] != "generate":
            assert called[1] in names, f"{page} names {name}"


@each_page
def test_make_targets_exist(page: Path) -> None:
    wanted = set(re.findall(r"\bmake ([a-z][a-z-]+)", "\n".join(quoted(page))))
    wanted |= {word for block in blocks(page, "sh") for word in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)}
    assert wanted <= MAKE_TARGETS


@each_page
def test_extras_exist(page: Path) -> None:
    wanted = {extra for block in blocks(page, "sh") for group in re.findall(r"\.\[([\w,]+)\]", block.text) for extra in group.split(",")}
    assert wanted <= set(PROJECT["optional-dependencies"])


def test_every_extra_and_every_variable_is_listed() -> None:
    text = read(Path("README.md")) + read(Path("docs/plugins.md"))
    listed = set(re.findall(r"^\| `([\w<>]+)` \|", text, re.MULTILINE))
    variables = {settings.ALLOW, settings.DENY, settings.DISABLE, f"{settings.PER_DEVICE}<DEVICE_TYPE>"}
    assert listed == variables | set(PROJECT["optional-dependencies"])


def test_the_readme_is_short_and_leads_to_every_page_of_use() -> None:
    text = read(Path("README.md"))
    assert len(text.splitlines()) <= 180
    for page in (page for page in PAGES if page.parent in (Path("docs"), Path("docs/backends"))):
        assert f"]({page})" in text or page.stem == "conformance-internals", f"the README does not lead to {page}"


def test_the_reference_lists_the_arguments_of_each_op() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \|$", read(Path("docs/backends/reference.md")), re.MULTILINE)
    listed = {op: tuple(re.findall(r"`(\w+)`", arguments)) for op, arguments in rows}
    assert listed == {op: schema.arg_names for op, schema in CATALOG.items()}


def test_the_architecture_spells_out_the_real_key() -> None:
    (quote,) = (block.text for block in blocks(ARCHITECTURE, "py"))
    assert plain(quote) in plain(inspect.getsource(OpEntry._entry_for))


def test_the_architecture_names_the_file_of_a_call() -> None:
    call = kvdock.Runtime().dispatcher.op("paged_caching_").call
    file = Path(inspect.getsourcefile(call) or "").relative_to(ROOT / "core" / "kvdock")
    assert f"`bound_call` in\n   `{file}`" in read(ARCHITECTURE)
    assert call.__code__.co_name == "call"


def plain(source: str) -> str:
    """Drop comments, spaces, and commas that end a tuple."""
    return re.sub(r"#.*|\s", "", source).replace(",)", ")")


@pytest.mark.parametrize(
    "name",
    re.findall(
        r"[\w]+",
        """
    Cache CacheConfig StaticKVCacheConfig StaticKVCache PagedKVCacheConfig PagedKVCache RankInfo
    KVCache createKVCache duplicateKVCache dropKVCache LRUDescriptorCache CacheManager createDescriptorKey IDescriptorDestroyer
    PagedCaching OpCache OpDispatcher
    BaseKVCache MHAKVCache store_kv KVCacheLayout KVCacheType BaseCacheManager BaseCacheHandle SizeInfo NaiveCacheManager RadixCacheManager
    BlockAllocator BasePrefixCache PrefillAdder page_table prepare_metadata store_kv available_size removeNode
    create_kvcache create_cache_manager unique_copy update match_prefix insert_prefix lock_handle evict check_integrity
""",
    ),
)
def test_the_page_on_the_documents_has_a_row_for(name: str) -> None:
    rows = re.findall(r"^\| (.+?) \|", read(DOCUMENTS), re.MULTILINE)
    assert any(re.search(rf"\b{name}\b", row) for row in rows)


def test_the_changelog_is_about_this_version() -> None:
    versions = re.findall(r"^## ([\d.]+)", read(Path("CHANGELOG.md")), re.MULTILINE)
    assert versions[0] == PROJECT["version"] == kvdock.__version__
