"""Run a separate aggregator in place of that of rank 0.

The command prints the variables for the training processes. After the last rank has left, or after Ctrl-C or
SIGTERM, the aggregator writes the summary and ends. LOG_INTERVAL must have the same value for this command and for
the training processes.

\b
Examples:
  effllm serve                            # on a free port, which is printed
  effllm serve --bind 127.0.0.1:5555 --run-name llama-7b
  EFFICIENTLLM_ENDPOINT=tcp://127.0.0.1:5555 torchrun ... train.py

Exit status: 0 summary written, 1 port not available, 2 wrong use.
"""

from __future__ import annotations

import re
import secrets
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from effllm.commands.output import complain
from effllm.config.settings import Config, read_config, secret_path
from effllm.config.switches import PREFIX, process_environ
from effllm.network import discovery, interface, listening, secret
from effllm.records.orders import Orders
from effllm.server.process import UNUSED, Server
from effllm.trainer.preflight import problems

_BIND = re.compile(r"(?:tcp://)?(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")


def main(
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the aggregator. With port 0, any free port is used.")
    ] = "127.0.0.1:0",
    run_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Parent folder of the run folder. [default: EFFICIENTLLM_RUN_DIR]")
    ] = "",
    run_name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of the run folder. [default: EFFICIENTLLM_RUN_NAME, else time and id]"),
    ] = "",
    job: Annotated[
        str, typer.Option(metavar="ID", help="Id of the job. In an existing run folder, a new id starts a new attempt.")
    ] = "",
) -> int:
    """Serve one job; return 1 if the port is not available, 2 for wrong use."""
    options = {f"{PREFIX}RUN_DIR": run_dir, f"{PREFIX}RUN_NAME": run_name}
    environ = {**process_environ(), **{name: value for name, value in options.items() if value}}
    environ.pop(f"{PREFIX}ENDPOINT", None)  # this variable is the address for training processes
    wrong = problems(environ)
    match = _BIND.fullmatch(bind)
    if match is None or int(match["port"]) > 65535:
        wrong.append(f"--bind {bind} is not HOST:PORT, such as 127.0.0.1:5555")
    elif interface.is_wildcard(match["host"]):
        wrong.append(f"--bind {bind} means every interface: give an address that the job can reach")
    if wrong or match is None:
        return max(complain("serve", line, 2) for line in wrong)  # prints each line, and returns 2
    config = replace(read_config(environ), endpoint=f"tcp://{match['host']}:{match['port']}")
    is_secured = discovery.is_secured(config)
    try:
        if is_secured and config.security == "auto" and interface.is_loopback(match["host"]):
            config = discovery.config_with_secret(config)  # for one host, also in a temporary folder
        elif is_secured:
            secret.read_or_create(secret_path(config))
    except secret.SecretError as error:
        return complain("serve", str(error), 2)
    name = config.run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        listener = listening.listen(match["host"].strip("[]"), int(match["port"]))
    except OSError as error:
        reason = error.strerror or str(error)
        return complain("serve", f"{reason}; choose another port, or 0 for any free port", 1)
    endpoint = f"tcp://{match['host']}:{listener.getsockname()[1]}"
    orders = Orders(
        config=replace(config, run_name=name, endpoint=""),
        job=job,
        endpoint=endpoint,
        folder=str((Path(config.run_dir) / name).absolute()),
        listen_descriptor=listener.detach(),
        facts={"launcher": "serve"},
        secured=is_secured,
    )
    server = Server(orders, sys.stdout)
    signal.signal(signal.SIGINT, server.stop)
    signal.signal(signal.SIGTERM, server.stop)
    _print_variables(config, endpoint, is_secured=is_secured)
    if server.run() == UNUSED:
        print("effllm serve: ended before any rank connected; there is no run folder", flush=True)
    return 0


def _print_variables(config: Config, endpoint: str, *, is_secured: bool) -> None:
    print("An aggregator is ready. Run in the shell of the training:\n")
    print(f"  export {PREFIX}ENDPOINT={endpoint}")
    if is_secured:
        print(f"  export {PREFIX}SECRET_FILE={shlex.quote(str(secret_path(config)))}")
        print("\nCopy the secret file to every host that does not have it, with mode 0600.")
    else:
        print(f"  export {PREFIX}SECURITY=none")
    print(flush=True)
    if not is_secured and (line := discovery.openness_warning(endpoint)):
        complain("serve", line)
