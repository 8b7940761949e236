"""Draw random sentences of the project for a review: ``python tests/draw_sentences.py SEED [COUNT]``.

COUNT is 100 by default; 0 draws all sentences. Each kind of text has the same share: comments, docstrings, help, texts
of events and log lines, documents, and test names. The same seed and commit give the same sentences.
"""

from __future__ import annotations

import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MIN_WORDS = 4
SOURCES = ("effllm", "tests", "integration", "benchmarks", "configs", "launch", ".ci")
DOCUMENTS = ("docs", "integration", "benchmarks", "README.md", "CONTRIBUTING.md", "SECURITY.md")
LEFT_OUT = ("tests/golden/", "tests/corpus/")
# Texts in these files are help texts of commands, settings and kinds of events.
HELP = ("effllm/commands/app.py", "effllm/config/settings.py", "effllm/records/events.py")
# A period after one of these abbreviations does not end a sentence.
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|fig|no|al|approx)|Eq|\bNo|\.\.)\.$", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?][)\"'`*]*\s+(?=[^a-z\s])")
# Comments for tools and separator lines are not sentences.
NO_SENTENCE = re.compile(r"#!|# ?(?:type:|noqa|nosec|fmt:|ruff:|pragma|shellcheck|-\*-|[-=]{3})")


class Sentence(NamedTuple):
    """A sentence, with the file and the first line of its paragraph."""

    kind: str
    path: str
    line: int
    text: str


def split(text: str) -> Iterator[str]:
    """Yield the sentences of one paragraph."""
    text = " ".join(text.split())
    start = 0
    for end in SENTENCE_END.finditer(text):
        before = text[start : end.start() + 1]
        if not ABBREVIATION.search(before):
            yield text[start : end.end()].strip()
            start = end.end()
    yield text[start:].strip()


def paragraphs(lines: list[str], first_line: int) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each paragraph and list item of a document or docstring, without code blocks and tables."""
    block: list[str] = []
    begin, is_fenced, code_indent = first_line, False, -1
    for number, line in enumerate([*lines, ""], first_line):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped.startswith("```"):
            is_fenced = not is_fenced
        is_code = (
            is_fenced
            or stripped.startswith(("```", "|", ">>>", "[![", "!["))
            or (stripped and 0 <= code_indent < indent)
        )
        is_item = bool(re.match(r"(?:[-*+]|\d+\.) |#+ |\w[\w, *]*: ?$|(?:\w+|``\w+``): \w", stripped)) and not (
            block and not re.match(r"[-*+] |#|\w+:", stripped)
        )
        if (not stripped or is_code or is_item) and block:
            yield begin, " ".join(block)
            block = []
        if stripped and not is_code:
            begin = begin if block else number
            block.append(re.sub(r"^(?:[-*+]|\d+\.|#+) ", "", stripped))
            code_indent = indent if stripped.endswith("::") else -1
        elif not stripped and code_indent < 0 and indent == 0:
            code_indent = -1


def without_code(lines: list[str]) -> list[str]:
    """Replace the indented code blocks of a Markdown document by empty lines."""
    kept, after_blank, is_list = [], True, False
    for line in lines:
        is_list = bool(re.match(r" *([-*+]|\d+\.) ", line)) or (is_list and (not line.strip() or line.startswith(" ")))
        is_code = line.startswith("    ") and after_blank and not is_list
        kept.append("" if is_code else line)
        after_blank = is_code or not line.strip()
    return kept


def comments(text: str, is_python: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment; comments on consecutive lines are joined."""
    found: list[tuple[int, int, str]] = []  # line, column (-1 for a comment after code), text
    if is_python:
        found = [
            (one.start[0], -1 if one.line[: one.start[1]].strip() else one.start[1], one.string)
            for one in tokenize.generate_tokens(io.StringIO(text).readline)
            if one.type == tokenize.COMMENT
        ]
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if match := re.match(r"(\s*)(#.*)", line):
                found.append((number, len(match[1]), match[2]))
            elif match := re.search(r"\s(#+ .*)", line):
                found.append((number, -1, match[1]))
    block: list[str] = []
    begin = last = column = -2
    for line, at, comment in [*found, (-9, 0, "#")]:
        is_next = line == last + 1 and at == column >= 0 and comment.strip("#: ") and not NO_SENTENCE.match(comment)
        if not is_next and block:
            yield begin, " ".join(block)
            block = []
        if not NO_SENTENCE.match(comment) and line >= 0:
            begin = begin if block else line
            block.append(comment.lstrip("#: ").strip())
            last, column = line, at


def string(node: ast.expr) -> str | None:
    """Return the text of a string; an f-string keeps its fields, such as {name}."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"  # type: ignore[attr-defined]
            for part in node.values
        )
    return None


def of_python(path: str, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a Python file."""
    tree = ast.parse(text)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Module):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.add(id(first.value))
                is_metric = path.startswith("effllm/metrics/") and any(
                    isinstance(one, ast.Call) for one in getattr(node, "decorator_list", ())
                )
                is_command = path.startswith("effllm/commands/") and isinstance(node, ast.Module)
                kind = "help" if is_metric or is_command or path == HELP[0] else "docstring"
                for line, block in paragraphs(first.value.value.splitlines(), first.value.lineno):
                    yield from (Sentence(kind, path, line, one) for one in split(block))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.lower().startswith("test_"):
            yield Sentence("test name", path, node.lineno, node.name)
    if path.startswith("effllm/"):
        inside: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                inside |= {id(part) for part in ast.walk(node)} - {id(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings | inside:
                kind = "help" if path in HELP or path.startswith("effllm/metrics/") else "event or log"
                for block in (string(node) or "").split("\n\n"):
                    yield from (Sentence(kind, path, node.lineno, one) for one in split(block))
    for line, comment in comments(text, is_python=True):
        yield from (Sentence("comment", path, line, one) for one in split(comment))


def files(names: tuple[str, ...], endings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each file below some folders."""
    for name in names:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(one for one in top.rglob("*") if one.is_file()):
            relative = path.relative_to(ROOT).as_posix()
            if path.suffix in endings and not relative.startswith(LEFT_OUT) and "__pycache__" not in relative:
                yield relative, path.read_text(errors="replace")


def sentences() -> Iterator[Sentence]:
    """Yield every sentence of the project."""
    for path, text in files(SOURCES, (".py",)):
        yield from of_python(path, text)
    for path, text in files((*SOURCES, "Makefile", "pyproject.toml"), (".sh", ".sbatch", ".yaml", ".yml", ".toml", "")):
        for line, comment in comments(text, is_python=False):
            yield from (Sentence("comment", path, line, one) for one in split(comment))
    for path, text in files(DOCUMENTS, (".md",)):
        for line, block in paragraphs(without_code(text.splitlines()), 1):
            yield from (Sentence("document", path, line, one) for one in split(block))


def is_prose(sentence: Sentence) -> bool:
    """Whether a text has at least MIN_WORDS words and is not mostly code."""
    if sentence.kind == "test name":
        return sentence.text.count("_") >= MIN_WORDS
    words = [
        one
        for one in sentence.text.split()
        if re.fullmatch(r"[(\"'`*]*[A-Za-z][a-z'-]*[A-Za-z]?[)\"'`*.,;:!?]*|[aAI]", one)
    ]
    return len(words) >= max(MIN_WORDS, len(sentence.text.split()) // 2)


def draw(seed: int, count: int) -> list[Sentence]:
    """Return `count` random sentences, with equal numbers of each kind; a count of 0 returns all sentences."""
    kinds: dict[str, list[Sentence]] = {}
    for one in sorted({one for one in sentences() if is_prose(one)}):
        kinds.setdefault(one.kind, []).append(one)
    if not count:
        return [one for found in kinds.values() for one in found]
    chance = random.Random(seed)
    for found in kinds.values():
        chance.shuffle(found)
    return sorted(kinds[kind].pop() for kind, _ in zip(sorted(kinds) * count, range(count), strict=False))


if __name__ == "__main__":
    for number, one in enumerate(draw(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100), 1):
        print(f"{number:3} {one.kind}  {one.path}:{one.line}\n    {one.text}")
