"""Check the built documentation site: ``make docs``, or ``python tests/check_site.py build/site``.

Every address of another host has the form of an address; mkdocs checks the links between pages. No page loads anything
from another host. No Markdown is left in a paragraph. If Chromium is installed, it opens every page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

#: Elements and attributes by which a browser loads a file without a click.
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "audio": "src", "video": "src"}
LOADED_BY_LINK = {"stylesheet", "icon", "preconnect", "preload", "prefetch", "modulepreload", "dns-prefetch"}
MARKDOWN = re.compile(r"^\s*([-*+] |\d+\. |#{1,6} |\|.*\||```|:::)|\]\(", re.MULTILINE)


class Page(HTMLParser):
    """The links, loaded files and paragraphs of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.paragraphs: list[str] = []
        self._in_paragraph = self._in_code = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attributes}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        elif tag == "link" and LOADED_BY_LINK & set(of.get("rel", "").split()):
            self.loads.append(of.get("href", ""))
        elif LOADS.get(tag) in of:
            self.loads.append(of[LOADS[tag]])
        elif tag == "p":
            self._in_paragraph = True
            self.paragraphs.append("")
        self._in_code = self._in_code or tag == "code"

    def handle_endtag(self, tag: str) -> None:
        self._in_paragraph = self._in_paragraph and tag != "p"
        self._in_code = self._in_code and tag != "code"

    def handle_data(self, data: str) -> None:
        if self._in_paragraph and not self._in_code:
            self.paragraphs[-1] += data


def problems_of(site: Path) -> Iterator[str]:
    """Yield the problems of the files of a site."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name}: {link} is not an address" for link in page.links if not is_link(link))
        yield from (f"{name} loads {load}" for load in page.loads if not is_local(load, path))
        yield from (f"{name}: Markdown in the text: {text[:80]!r}" for text in page.paragraphs if MARKDOWN.search(text))
    for path in site.rglob("*.css"):
        for load in re.findall(r"(?:url\(|@import )\s*['\"]?([^'\")]+)", path.read_text()):
            if not load.startswith(("data:", "#")) and urlsplit(load).netloc:
                yield f"{path.relative_to(site)} loads {load}"
    index = site / "search" / "search_index.js"
    if not index.exists() or any(str(path.relative_to(site)) not in index.read_text() for path in pages):
        yield "the search index has not every page"


def is_link(link: str) -> bool:
    """Whether a link is inside the site, or has the form of an address."""
    at = urlsplit(link)
    is_address = at.scheme in ("http", "https") and re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", at.hostname or "")
    return bool(not at.scheme or is_address or at.scheme == "mailto")


def is_local(load: str, path: Path) -> bool:
    """Whether a file that a page loads is a file of the site, or in the page."""
    return load.startswith("data:") or (not urlsplit(load).netloc and (path.parent / urldefrag(load)[0]).is_file())


def seen_in_browser(site: Path) -> Iterator[str]:
    """Yield the problems that a browser reports; it opens every page from the disk, and searches."""
    from browser import Browser

    root, browser = site.as_uri(), Browser()
    try:
        for path in sorted(site.rglob("*.html")):
            if path.name != "404.html":
                browser.open(path)
                others = [url for url in browser.requests if not url.startswith((root, "data:", "about:", "blob:"))]
                yield from (f"{path.relative_to(site)}: {found}" for found in (*browser.problems, *others))
        browser.open(site / "index.html")
        found = browser.value(SEARCH)
        if "docs/ledger.html" not in found:
            yield f"a search for the word ledger found {found}"
    finally:
        browser.close()


#: Types a word into the search of the page, and returns the addresses of the results.
SEARCH = """(async () => {
  const query = document.querySelector("[data-md-component=search-query]");
  document.querySelector("#__search").click();
  for (let i = 0; i < 100; i++) {
    query.value = "ledger";
    query.dispatchEvent(new Event("keyup"));
    query.dispatchEvent(new Event("focus"));
    const links = [...document.querySelectorAll(".md-search-result__link")].map(one => one.href);
    if (links.length) return links.join(" ");
    await new Promise(wait => setTimeout(wait, 100));
  }
  return "nothing";
})()"""


def main(folder: str) -> int:
    """Print the problems of a site; return 1 if there are problems."""
    from browser import CHROMIUM

    site = Path(folder).resolve()
    problems = [*problems_of(site), *(seen_in_browser(site) if CHROMIUM else ())]
    print(*problems, sep="\n", end="\n" if problems else "")
    if CHROMIUM is None:
        print("Chromium is not installed: the pages were not opened in a browser (apt-get install chromium)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
