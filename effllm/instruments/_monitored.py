"""The devices of a rank that an energy monitor measures, or the reason why it measures none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from effllm.instruments._device import cuda_index, read_device, torch_cuda
from effllm.records.plain_text import one_line

Facts = Sequence[Mapping[str, Any]]  # of the rank's devices, as the agent publishes them


class MonitoredDevices:
    """The devices that a monitor was asked for.

    Args:
        device: an index, ``"cuda:1"``, ``"cpu"``, or ``None`` for all GPUs of the rank.

    Raises:
        UnknownDevice: the device cannot exist.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._is_cpu, self._index = read_device(device)
        self._shares_gpu = False  # whether torch has one GPU, which several ranks may share
        if self._index is not None:  # without an index, torch would start CUDA to return its current device
            cuda_index(device)
            cuda = torch_cuda()
            self._shares_gpu = cuda is not None and cuda.device_count() == 1

    def positions(self, facts: Facts) -> list[int]:
        """Return the positions of the devices to measure.

        Without a GPU, the sensors of the host are measured for any device, as by the other instruments. They do not
        stand for a GPU that cannot be read, if this GPU was asked for.
        """
        own = [n for n, device in enumerate(facts) if device and not device.get("only_power")]
        gpus = [n for n in own if facts[n].get("is_gpu")]
        if self._device is None:
            return own
        if self._is_cpu or not gpus:
            is_hidden = not self._is_cpu and any(_about_gpus(facts[n]) for n in own)
            return [] if is_hidden else [n for n in own if n not in gpus]
        if self._index is None or self._shares_gpu:
            return gpus
        return [n for n in gpus if facts[n].get("torch_index") == self._index]

    def names(self, facts: Facts) -> str:
        """Return the names of the measured devices."""
        return ", ".join(dict.fromkeys(str(facts[n].get("name", "")) for n in self.positions(facts)))

    def reason(self, facts: Facts, unavailable: Sequence[str]) -> str:
        """Return why no energy was measured, in one line."""
        chosen = self.positions(facts)
        own = [device for device in facts if device and not device.get("only_power")]
        if not chosen and not own:
            return one_line("; ".join(unavailable)) or "this rank has no device that effllm can read"
        if not chosen:
            hidden = [text for device in own for text in _about_gpus(device)]
            names = ", ".join(dict.fromkeys(_named(device) for device in own))
            return one_line(hidden[0] if hidden else f"device={self._device!r} was requested; the agent reads {names}")
        reasons = [str(text) for n in chosen for text in facts[n].get("not_measured", ())]
        # A reason about the GPU comes first, because it explains why the sensors of the host were read.
        about = [text for n in chosen for text in _about_gpus(facts[n])]
        about += [text for text in reasons if "energy" in text]
        first = about[0].removeprefix("energy: ") if about else f"{self.names(facts)} has no reading of energy here"
        return one_line(first)


def _about_gpus(device: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the agent reads this device in place of a GPU."""
    return [str(text) for text in device.get("not_measured", ()) if str(text).startswith("GPU")]


def _named(device: Mapping[str, Any]) -> str:
    index = device.get("torch_index")
    return f"{device.get('name')} (cuda:{index})" if index is not None else str(device.get("name"))
