"""effllm/records/plain_text.py: text from other processes cannot move the cursor, forge a line or fill the screen."""

import pytest
from cases import cases

from effllm.records.plain_text import MAX_SHOWN, one_line

HOSTILE = [
    "node\x1b[2J\x1b[1;1H7",
    "node\r\n[EfficientLLM] Run completed",
    "a\x00b\x07c\x08\x08\x08",
    "\x9b31mred",
    "\x1b]0;title\x07",
    "safe\u202etxt.exe",
    "a\u2028b\u2029c\u0085d",
    "\ud800 lone",
]


@cases("text", HOSTILE)
def test_hostile_text_becomes_one_printable_line(text):
    assert one_line(text).isprintable()
    assert len(one_line(text).splitlines()) == 1


@pytest.mark.parametrize("text", ["rank 3 joined from node-7", "größer als ±5 % · 中文", ""])
def test_plain_text_is_unchanged(text):
    assert one_line(text) == text


def test_long_text_is_cut():
    assert len(one_line("x" * 10**6)) == MAX_SHOWN
    assert one_line("x" * 10**6).endswith("x…")
