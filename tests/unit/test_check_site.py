"""The checks of the documentation site, on small sites."""

import pytest
from check_site import problems_of


def site(folder, body, head="", **others):
    """Write a site with the page index.html and other pages; the search index has all pages."""
    pages = {"index": body, **others}
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(f"<html><head>{head}</head><body>{text}</body></html>")
    (folder / "search").mkdir()
    (folder / "search" / "search_index.js").write_text(" ".join(f"{name}.html" for name in pages))
    return folder


def test_correct_page_has_no_problem(tmp_path):
    (tmp_path / "main.css").write_text("a { background: url(data:image/png;base64,AA) }")
    body = '<p id="top"><a href="other.html#there">a</a> <a href="https://arxiv.org/abs/1">b</a> <code>- x</code></p>'
    head = '<link rel="stylesheet" href="main.css">'
    assert list(problems_of(site(tmp_path, body, head, other='<a href="index.html#top" id="there">c</a>'))) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="https://nowhere/x">a</a>', "https://nowhere/x is not an address"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        ('<img src="gone.png">', "loads gone.png"),
        ("<p>text\n- not a list</p>", "Markdown in the text"),
        ("<p>[a](b.md)</p>", "Markdown in the text"),
    ],
)
def test_problem_of_a_page_is_named(tmp_path, body, problem):
    (found,) = problems_of(site(tmp_path, body, other="text"))
    assert found.startswith("index.html")
    assert problem in found


def test_page_without_an_entry_in_the_search_is_named(tmp_path):
    folder = site(tmp_path, "text")
    (folder / "search" / "search_index.js").write_text("")
    assert list(problems_of(folder)) == ["the search index has not every page"]
