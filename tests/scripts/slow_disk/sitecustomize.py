"""Makes the reads of a disk wait while a file exists, as on a network file system whose server does not answer.

Python imports this file at its start if the folder is on PYTHONPATH.  The variable TESTS_SLOW_WHILE names the file.
"""

import os
import threading
import time
from pathlib import Path

WAITS = Path(os.environ["TESTS_SLOW_WHILE"])
read, stat = os.pread, os.stat


def waiting(function):
    def after_waiting(*arguments, **keywords):
        # Modules are imported by the main thread, from a disk that answers.
        while threading.current_thread() is not threading.main_thread() and os.access(WAITS, os.F_OK):
            time.sleep(0.02)
        return function(*arguments, **keywords)

    return after_waiting


os.pread, os.stat = waiting(read), waiting(stat)
