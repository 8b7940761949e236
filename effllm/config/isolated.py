"""Work in a process of its own, which may run for a time and use memory up to limits, and has no network.

For code of other packages that may raise anything, print, or never end: the building of a model.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from effllm.config.spawn import module_command
from effllm.config.switches import process_environ

MAX_MEMORY_BYTES = 8 * 2**30  # of the data of the process; a model on the meta device has no weights
_ISOLATED_ENVIRON = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "EFFICIENTLLM_METRICS_ENABLED": "0",
    "EFFICIENTLLM_ATTACH": "0",
}


class NoAnswer(ValueError):
    """Work without a result, with the reason as a sentence."""


def ask(module: str, verb: str, document: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    """Run ``module.main``, which calls `answer`, in a process of its own; send it a document, and return its reply.

    Raises:
        NoAnswer: with the reason of the process, or the limit that ended it; ``verb`` names the work.
    """
    limit_memory = partial(resource.setrlimit, resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        done = subprocess.run(
            module_command(module),
            input=json.dumps(document),
            capture_output=True,
            text=True,
            timeout=deadline_s,
            env={**process_environ(), **_ISOLATED_ENVIRON},
            preexec_fn=limit_memory,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"transformers did not {verb} the model in {deadline_s:.0f} s") from None
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NoAnswer(f"the process to {verb} the model ended: {last[:300]}") from None
    if "reason" in reply:
        raise NoAnswer(reply["reason"])
    return reply


def answer(work: Callable[[Any], dict[str, Any]]) -> None:
    """Read a document on stdin, and print what ``work`` returns for it, or the reason why it fails."""
    reply_to, sys.stdout = sys.stdout, sys.stderr  # packages may print
    socket.socket.connect = _refuse_connection  # type: ignore[method-assign]
    try:
        reply = work(json.load(sys.stdin))
    except NoAnswer as error:
        reply = {"reason": str(error)}
    except Exception as error:  # noqa: BLE001 - the code of a model may raise anything
        lines = str(error).strip().splitlines() or [""]
        reply = {"reason": f"{type(error).__name__}: {lines[0][:300]}"}
    print(json.dumps(reply), file=reply_to)


def _refuse_connection(*_: Any) -> NoReturn:
    raise OSError("no network")
