"""Everything is declared in pyproject.toml; this file serves tools that still call it."""

from setuptools import setup

setup()
