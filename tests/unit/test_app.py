"""The declared commands."""

import inspect
from importlib import import_module

from cases import cases

from effllm.commands.app import app

DECLARED = {
    info.callback.__name__: info.callback for info in app.registered_commands if hasattr(info.callback, "__wrapped__")
}


@cases("command", sorted(DECLARED))
def test_every_option_of_a_command_is_a_parameter_of_its_module(command):
    options = inspect.signature(DECLARED[command]).parameters
    main = inspect.signature(import_module(f"effllm.commands.{command}").main)

    main.bind(**dict.fromkeys(options))  # raises TypeError if one is missing or unknown

    rest = [one.name for one in main.parameters.values() if one.kind is one.VAR_KEYWORD]
    assert set(main.parameters) - {*rest} <= set(options)


def test_commands_that_start_without_typer_have_no_declared_module():
    assert not {"env", "run", "top"} & set(DECLARED)
    assert {"demo", "fit", "compare", "runs", "simulate"} <= set(DECLARED)
