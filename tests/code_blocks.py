"""The code blocks of the documents: their languages, the commands and options in them, and the names of Python.

A block of the language ``python`` runs in a test; a block ``py`` is only compiled, because it needs a training.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from effllm.commands.app import app
from effllm.config.settings import ALL_VARIABLES, ConfigError, read_config
from effllm.config.switches import PREFIX

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {"bash", "diff", "json", "py", "python", "sh", "text", "yaml"}
SHELL = {"bash", "sh"}
#: Folders of the repository: a path that begins with one of them must exist.
FOLDERS = tuple(f"{name}/" for name in ("benchmarks", "configs", "docs", "effllm", "integration", "launch", "tests"))
_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_EFFLLM: Any = typer.main.get_command(app)
_VARIABLES = {PREFIX + one.name for one in ALL_VARIABLES}
_TARGETS = {
    target
    for name in ("Makefile", "integration/sft_play/Makefile")
    for line in re.findall(r"^([a-z][\w -]*):", (ROOT / name).read_text(), re.MULTILINE)
    for target in line.split()
}
_EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


class Block(NamedTuple):
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(document, text[: found.start()].count("\n") + 1, found[2], textwrap.dedent(found[3]))
        for found in _FENCE.finditer(text)
    ]


def problems_of_shell(code: str) -> Iterator[str]:
    """Yield what is wrong with the commands of a shell block: commands, options, files, extras, settings."""
    for words in commands(code):
        yield from problems_of_settings(words)
        words = [word for word in words if not re.fullmatch(r"\w+=.*", word, re.DOTALL)]
        if "-m" in words[:-1] and words[words.index("-m") + 1] == "effllm":
            words = words[words.index("-m") + 1 :]
        elif "-m" in words[:-1] and words[0].startswith("python"):
            module = words[words.index("-m") + 1]
            if module.startswith(("benchmarks", "effllm", "tests")) and importlib.util.find_spec(module) is None:
                yield f"there is no module {module}"
        if words[:1] == ["effllm"]:
            yield from problems_of_effllm(words[1:])
        elif words[:1] == ["make"]:
            targets = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            yield from (f"there is no target {target}" for target in targets if target not in _TARGETS)
        elif words[:2] == ["pip", "install"]:
            named = {extra for word in words for extra in re.findall(r"\[(\w+)\]$", word)}
            yield from (f"there is no extra {extra}" for extra in sorted(named - _EXTRAS))
        for word in words:
            if word.startswith(FOLDERS) and not (ROOT / word).exists():
                yield f"there is no file {word}"


def commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each simple command; a command in $(...) is a command of its own."""
    code = re.sub(r"\\\n", " ", code)
    for inner in re.findall(r"\$\(([^()]*)\)", code):
        yield from commands(inner)
    for line in re.sub(r"\$\([^()]*\)", "VALUE", code).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set(";&|"):
                yield from filter(None, [words])
                words = []
            else:
                words.append(word)
        yield from filter(None, [words])


def problems_of_effllm(words: list[str]) -> Iterator[str]:
    """Yield what is wrong with the command line after the word effllm: the subcommand and the names of options."""
    if not words:
        return
    command = _EFFLLM.get_command(None, words[0])
    if command is None:
        if not words[0].startswith("-"):
            yield f"there is no command effllm {words[0]}"
        return
    if words[0] == "run":
        return  # options after the script are those of the script
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
    for word in words[1:]:
        name = word.partition("=")[0]
        if re.match(r"--?[a-zA-Z]", name) and name not in known:
            yield f"effllm {words[0]} has no option {name}"


def problems_of_settings(words: list[str]) -> Iterator[str]:
    """Yield wrong values of settings in assignments such as EFFICIENTLLM_LOG_INTERVAL=50."""
    for word in words:
        name, is_assignment, value = word.partition("=")
        if is_assignment and name.startswith(PREFIX) and "$" not in value:
            try:
                read_config({name: value})
            except ConfigError as error:
                yield str(error)


def problems_of_prose(text: str) -> Iterator[str]:
    """Yield unknown settings, and unknown commands of effllm in `code` of the text."""
    for name in sorted(set(re.findall(rf"\b{PREFIX}[A-Z][A-Z_]*[A-Z]\b", text)) - _VARIABLES):
        yield f"there is no setting {name}"
    for code in re.findall(r"(?<!`)`(effllm [^`]+)`(?!`)", _FENCE.sub("", text)):
        with_words = code.replace("\n", " ").replace("...", "").split()
        yield from problems_of_effllm([word for word in with_words[1:] if not word.startswith(("[", "|"))])


def problems_of_python(code: str) -> Iterator[str]:
    """Yield names of effllm that do not exist, after the code was compiled."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("effllm"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not _has(module, alias.name):
                    yield f"{node.module} has no {alias.name}"
        is_attribute = (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "effllm"
        )
        if is_attribute and not _has(importlib.import_module("effllm"), node.attr):
            yield f"effllm has no {node.attr}"


def _has(module: object, name: str) -> bool:
    return name in getattr(module, "_HOMES", {}) or hasattr(module, name)
