"""Multiplies the timeouts of trainers and agents by ten, so that a slow machine causes no timeout.

Python imports this file at its start if the folder is on PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import sys

TIMES = 10
LIMITS = {
    "effllm.trainer.session": ("READY_S", "FIRST_RANK_ENDS_S", "OTHER_RANKS_END_S"),
    "effllm.agent.agent": ("SEND_REMAINING_S", "AGGREGATOR_ENDS_S"),
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in LIMITS; multiplies the timeouts of a module after it is loaded."""

    def find_spec(self, fullname, path, target=None):
        """Return the standard spec of a module in LIMITS, with a changed loader."""
        if fullname not in LIMITS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for limit in LIMITS[fullname]:
                setattr(module, limit, TIMES * getattr(module, limit))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
