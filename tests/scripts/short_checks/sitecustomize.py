"""Makes the checks of unused GPUs frequent, so that a test of them takes seconds.

Python imports this file at its start if the folder is on PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import sys

LIMITS = {"effllm.job.unused": {"SETTLED_S": 1.0}, "effllm.agent.allocation_watch": {"CHECK_EVERY_S": 0.2}}


class ShortChecks(importlib.abc.MetaPathFinder):
    """Finds the modules in LIMITS; sets the limits of a module after it is loaded."""

    def find_spec(self, fullname, path, target=None):
        """Return the standard spec of a module in LIMITS, with a changed loader."""
        if fullname not in LIMITS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            vars(module).update(LIMITS[fullname])

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, ShortChecks())
