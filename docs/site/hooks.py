"""Hooks of MkDocs: the clone as a site, in which every relative link of its pages works.

Pages outside docs/ are added, folders get a page that lists their files, notebooks become pages, and the reference has
one page for each folder of the package.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "pclmix"
SINGLE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE")
FOLDERS = ("results", "recipes", "examples")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the navigation of the folders whose pages are found here."""
    assert config.nav is not None
    config.nav = _expanded(config.nav)
    return config


def _expanded(nav: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in nav:
        if item == "results":
            found += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("results/*/*.md"))]
        elif isinstance(item, dict):
            ((title, inside),) = item.items()
            if inside == "reference":
                inside = ["reference/README.md", *(f"reference/{name}.md" for name in packages())]
            found.append({title: _expanded(inside) if isinstance(inside, list) else inside})
        else:
            found.append(item)
    return found


def packages() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site by their paths in the clone; those of docs/ are served without that folder's name."""
    # What notebooks wrote when they ran lies beside them; they become pages below.
    whole = Files([file for file in files if not file.src_uri.startswith("notebooks/")])
    for file in list(whole):
        if file.src_dir == config.docs_dir and not file.src_uri.startswith("site/"):
            whole.remove(file)
            whole.append(_moved(File.generated(config, f"docs/{file.src_uri}", abs_src_path=file.abs_src_path)))
    for name in (*SINGLE, *_inside(FOLDERS)):
        whole.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for folder in _folders():
        if not (ROOT / folder / "README.md").is_file():
            listing = File.generated(config, f"{folder}/README.md", content=_listing(folder))
            listing.inclusion = InclusionLevel.NOT_IN_NAV  # unless the navigation names it
            whole.append(listing)
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        text, resources = MarkdownExporter().from_filename(str(path), {"output_files_dir": f"{path.stem}_files"})
        folder = "docs/notebooks"
        whole.append(_moved(File.generated(config, f"{folder}/{path.stem}.md", content=text)))
        for name, content in resources["outputs"].items():
            whole.append(_moved(File.generated(config, f"{folder}/{name}", content=content)))
    for name, text in _reference():
        whole.append(File.generated(config, f"reference/{name}.md", content=text))
    return whole


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to folders lead to their pages, links to notebooks to the pages made of them.

    Python-Markdown reads `[1] [name](address)` as one link; GitHub does not.
    """

    def target(match: re.Match[str]) -> str:
        link = match.group(1)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link))
        if files.get_file_from_path(f"{path}/README.md"):
            return f"{link.rstrip('/')}/README.md"
        return f"{link.removesuffix('.ipynb')}.md" if link.endswith(".ipynb") else link

    return LINK.sub(target, re.sub(r"\[(\d+)\] (?=\[)", r"\[\1\] ", markdown))


def _moved(file: File) -> File:
    file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file


def _inside(folders: tuple[str, ...]) -> Iterator[str]:
    for folder in folders:
        yield from (str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).rglob("*")) if path.is_file())


def _folders() -> list[str]:
    deeper = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_dir()]
    return [*FOLDERS, *sorted(str(path.relative_to(ROOT)) for path in deeper)]


def _listing(folder: str) -> str:
    """A page for a folder: its files, and of recipes the text."""
    lines = [f"# {folder}", ""]
    entries = sorted(path for path in (ROOT / folder).iterdir() if not path.name.startswith("."))
    if folder == "recipes":
        return "\n".join([*lines, *(f"## {p.stem}\n\n```yaml\n{p.read_text(encoding='utf-8')}```\n" for p in entries)])
    return "\n".join([*lines, *(f"- [{p.name}]({p.name}{'/README.md' if p.is_dir() else ''})" for p in entries)])


def _reference() -> Iterator[tuple[str, str]]:
    names = packages()
    table = "\n".join(f"| [`pclmix.{name}`]({name}.md) | {_about(name)} |" for name in names)
    public = (ROOT / "docs" / "site" / "reference.md").read_text(encoding="utf-8")
    yield "README", f"{public}\n| folder | contents |\n|---|---|\n{table}\n"
    for name in names:
        parts = sorted(path.stem for path in (PACKAGE / name).glob("*.py") if path.stem != "__init__")
        inside = sorted(path.parent.name for path in (PACKAGE / name).glob("*/__init__.py"))
        modules = [f"pclmix.{name}", *(f"pclmix.{name}.{part}" for part in (*parts, *inside))]
        yield name, "\n".join([f"# pclmix.{name}", "", *(f"::: {module}\n" for module in modules)])


def _about(name: str) -> str:
    """The first sentence of a package's docstring."""
    text = (PACKAGE / name / "__init__.py").read_text(encoding="utf-8").removeprefix('"""')
    return re.split(r"(?<=\.)\s|\"\"\"", text, maxsplit=1)[0].replace("\n", " ")
