"""What the user has chosen: the pane, the order of the table, and the replay.  A key changes it."""

from __future__ import annotations

from typing import NamedTuple

from effllm.views.top.ranks import SORTS

RANKS, EVENTS, WATERFALL, HELP = "ranks", "events", "waterfall", "help"
PANES = (RANKS, EVENTS, WATERFALL, HELP)
#: Windows per second of a replay.
SPEEDS = (1, 2, 5, 10, 20, 50)
JUMP = 0.05  # share of the run
MAX_FILTER = 40

#: Keys in the help and in the last line: key -> meaning.
KEYS: dict[str, str] = {
    "r": "ranks",
    "e": "events",
    "w": "waterfall",
    "?": "help",
    "g": "group by host",
    "s S": "sort by the next or the last column",
    "/": "filter by rank, host or reason; Enter ends, Esc clears",
    "up down": "scroll; also j k, and a page with PgUp PgDn",
    "left right": "one window back or forward",
    "home end": "first window; newest window",
    "[ ]": "5 % of the run back or forward",
    "space": "play or pause",
    "+ -": "speed of the replay",
    "q": "quit; also Ctrl-C",
}


class Order(NamedTuple):
    """The order of the table, and its filter."""

    sort: str = SORTS[0]
    text: str = ""  # only lines that contain it
    by_host: bool = False  # whether a line is a host


class TopView(NamedTuple):
    """The choices of the user."""

    pane: str = RANKS
    order: Order = Order()
    offset: int = 0  # first shown line of the pane
    is_typing: bool = False  # whether keys are letters of the filter
    is_playing: bool = False
    speed: int = 0  # index in `SPEEDS`


class Action(NamedTuple):
    """A request to the source of the values, or the end."""

    kind: str  # quit, newest, oldest, pause, step or share
    amount: float = 0.0


QUIT = Action("quit")
_ACTION_OF_KEY = {
    "left": Action("step", -1),
    "right": Action("step", 1),
    "home": Action("oldest"),
    "end": Action("newest"),
    "[": Action("share", -JUMP),
    "]": Action("share", JUMP),
}
_PANE_OF_KEY = {"r": RANKS, "e": EVENTS, "w": WATERFALL, "?": HELP, "h": HELP}
_SCROLL_LINES = {"up": -1, "k": -1, "down": 1, "j": 1}


class ShownPane(NamedTuple):
    """The pane on the screen, as far as the effect of a key depends on it."""

    num_shown: int = 1  # lines of the pane on the screen
    num_lines: int = 0  # all lines of the pane
    is_newest: bool = True  # whether the newest window is shown
    is_over: bool = False


def after_key(view: TopView, key: str, shown: ShownPane) -> tuple[TopView, Action | None]:
    """Return the view after a key (a letter, or the name of a key), and the action that the key requests."""
    if key == "ctrl-c":
        return view, QUIT
    if view.is_typing:
        return _filter_after_key(view, key), None
    if key == "q":
        return view, QUIT
    if key in _ACTION_OF_KEY:
        return view._replace(is_playing=False), _ACTION_OF_KEY[key]
    if key == "space":
        return _toggle_replay(view, shown)
    return _view_after_key(view, key, shown), None


def _toggle_replay(view: TopView, shown: ShownPane) -> tuple[TopView, Action | None]:
    """Play or pause; at the end of a run, play from its start, and pause a running job."""
    if view.is_playing or not shown.is_newest:
        return view._replace(is_playing=not view.is_playing), None
    return view._replace(is_playing=shown.is_over), Action("oldest" if shown.is_over else "pause")


def _view_after_key(view: TopView, key: str, shown: ShownPane) -> TopView:
    scrolled = {"pgup": -shown.num_shown, "pgdn": shown.num_shown, **_SCROLL_LINES}.get(key)
    if scrolled is not None:
        return view._replace(offset=max(0, min(view.offset + scrolled, shown.num_lines - shown.num_shown)))
    if key in _PANE_OF_KEY:
        pane = RANKS if _PANE_OF_KEY[key] == view.pane else _PANE_OF_KEY[key]
        return view._replace(pane=pane, offset=0)
    if key == "tab":
        return view._replace(pane=PANES[(PANES.index(view.pane) + 1) % len(PANES)], offset=0)
    if key in ("s", "S"):
        sort = SORTS[(SORTS.index(view.order.sort) + (1 if key == "s" else -1)) % len(SORTS)]
        return view._replace(pane=RANKS, offset=0, order=view.order._replace(sort=sort))
    if key == "g":
        return view._replace(pane=RANKS, offset=0, order=view.order._replace(by_host=not view.order.by_host))
    if key == "/":
        return view._replace(pane=RANKS, is_typing=True)
    if key == "esc":
        return view._replace(offset=0, order=view.order._replace(text=""))
    if key in ("+", "="):
        return view._replace(speed=min(view.speed + 1, len(SPEEDS) - 1))
    if key == "-":
        return view._replace(speed=max(view.speed - 1, 0))
    return view


def _filter_after_key(view: TopView, key: str) -> TopView:
    if key == "enter":
        return view._replace(is_typing=False)
    text = view.order.text
    if key == "esc":
        return view._replace(is_typing=False, offset=0, order=view.order._replace(text=""))
    if key == "backspace":
        text = text[:-1]
    elif key == "space":
        text += " "
    elif len(key) == 1 and key.isprintable():
        text += key
    return view._replace(offset=0, order=view.order._replace(text=text[:MAX_FILTER]))
