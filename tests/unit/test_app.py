"""The declared commands."""

import inspect
from importlib import import_module

from cases import cases

from effllm import cli
from effllm.commands.app import DECLARED, OF_WORDS


@cases("command", sorted({*DECLARED} - {*OF_WORDS}))
def test_every_option_of_a_command_is_a_parameter_of_its_module(command):
    options = DECLARED[command].options
    main = inspect.signature(import_module(f"effllm.commands.{command}").main)

    main.bind(**dict.fromkeys(options))  # raises TypeError if one is missing or unknown

    rest = [one.name for one in main.parameters.values() if one.kind is one.VAR_KEYWORD]
    assert set(main.parameters) - {*rest} <= set(options)


def test_commands_of_words_are_those_that_start_without_typer():
    assert sorted(OF_WORDS) == sorted(cli._LIGHT)


def test_options_of_a_command_of_words_are_words_again():
    top = DECLARED["top"].options
    values = {"run": "RUN", "endpoint": "", "token_file": "FILE", "ca_file": "", "once": True, "as_json": False}

    words = [word for name, one in top.items() for word in one.words(name, values[name])]

    assert words == ["RUN", "--token-file", "FILE", "--once"]
