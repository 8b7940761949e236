"""The AMD SMI library: its import, its errors, and calls that some releases lack."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from effllm.devices import DeviceUnavailable

# amdsmi_status_t, equal in all releases.
_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED, _NO_PERMISSION, _DRIVER_NOT_LOADED = 2, 3, 10, 34
LACKING = (_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED, _NO_PERMISSION)

_DEVICE_NODES = Path("/dev")
_NO_ACCESS = "this user may not open the AMD GPUs: grant access to /dev/kfd and /dev/dri (groups render and video)"


def import_library() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # amdsmi prints a message if its C library is missing
            import amdsmi
    except ImportError as error:
        raise DeviceUnavailable(
            "the Python package amdsmi is not installed: install the version of your ROCm release, "
            "from /opt/rocm/share/amd_smi, or effllm[amd]"
        ) from error
    except (AttributeError, KeyError, OSError) as error:
        # AttributeError and KeyError: libamd_smi.so is missing, or belongs to another release.
        raise DeviceUnavailable(
            f"the Python package amdsmi cannot use libamd_smi.so ({type(error).__name__}: {error}): "
            "install ROCm's amd-smi-lib of the same release"
        ) from error
    return amdsmi


def advice(error: Exception | None) -> str:
    """Return one sentence with the reason why no GPU can be read, and the remedy."""
    code = getattr(error, "err_code", None)
    nodes = [_DEVICE_NODES / "kfd", *sorted((_DEVICE_NODES / "dri").glob("renderD*"))]
    present = [node for node in nodes if node.exists()]
    if code == _NO_PERMISSION or (present and not all(os.access(node, os.R_OK | os.W_OK) for node in present[:2])):
        return _NO_ACCESS
    if code == _DRIVER_NOT_LOADED:
        return "the amdgpu driver is not loaded: load it, or choose another device"
    if error is None:
        return "AMD SMI lists no GPU: give the container /dev/kfd and /dev/dri, or choose another device"
    return f"AMD SMI does not start: {sentence(error)}"


def errors_of(smi: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that a call may raise.

    The library has one exception of its own.  Other exceptions are raised if this release lacks the function, or if the
    Python wrapper receives an unexpected answer (the wrapper of ROCm 5.7 fails while it raises AmdSmiRetryException).
    """
    return (smi.AmdSmiException, AttributeError, KeyError, OSError, TypeError, ValueError)


def sentence(error: Exception) -> str:
    return " ".join(str(getattr(error, "err_info", "") or error).split()) or type(error).__name__


def ask(smi: Any, call: str, *arguments: Any) -> Any:
    """Return the answer of a call that some releases or GPUs lack; an empty answer if the call fails."""
    with contextlib.suppress(*errors_of(smi)):
        return getattr(smi, call)(*arguments)
    return {}


def driver_of(smi: Any, handle: Any) -> str:
    info, version = ask(smi, "amdsmi_get_gpu_driver_info", handle), ask(smi, "amdsmi_get_lib_version")
    driver = " ".join(part for name in ("driver_name", "driver_version") if (part := info.get(name, "N/A")) != "N/A")
    numbers = [str(version[part]) for part in ("year", "major", "minor", "release") if part in version]
    return ", ".join(part for part in (driver, numbers and f"AMD SMI {'.'.join(numbers)}") if part)
