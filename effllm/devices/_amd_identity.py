"""Finds the AMD GPU of a rank, and the die of a card that reports for both."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from effllm.devices import DeviceUnavailable, Site, shown_to_rank
from effllm.devices._amd_library import advice, ask, errors_of
from effllm.devices._amd_readings import ask_group, joules_of, number, power

_FOUR_LINKS_MB_PER_S = 200_000


@dataclass(frozen=True)
class Processor:
    """A GPU, one die of a two-die card, or a partition of a GPU: anything with a handle in AMD SMI."""

    handle: Any
    bus: tuple[int, int, int, int]  # domain, bus, device, function
    serial: str  # 16 hexadecimal digits: the id that ROCm's UUIDs are made of; empty where the GPU has none
    names: frozenset[str]  # its UUIDs in the environment and in torch
    model: str
    is_half: bool  # one die of an MI250 or MI250X
    has_cpu: bool  # an MI300A, whose socket, and so its power and energy, has CPU and GPU in it

    def key(self, host: str) -> str:
        """Return the UUID that rocminfo shows and ROCR_VISIBLE_DEVICES takes, else the place in this host."""
        domain, bus, device, function = self.bus
        return f"GPU-{self.serial}" if self.serial else f"{host}-{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def _serial(answer: Any) -> str:
    """Return the unique id in 16 digits; GPUs without one give zero, all bits or "N/A"."""
    try:
        number = int(str(answer), 16)
    except ValueError:
        return ""
    return f"{number:016x}" if 0 < number < 2**64 - 1 else ""


def _plain(uuid: str) -> str:
    return uuid.strip().lower().removeprefix("gpu-").replace("-", "")


def _without_ascii(plain: str) -> str:
    """Return the 16 digits that HIP, and so torch, gives as 16 letters instead of as a number of 16 bytes."""
    try:
        letters = bytes.fromhex(plain).decode("ascii").lower()
    except ValueError:
        return plain
    return letters if re.fullmatch("[0-9a-f]{16}", letters) else plain


def _bus_of(text: str) -> tuple[int, int, int, int] | None:
    found = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.([0-9a-f]+)", text.strip().lower())
    if found is None:
        return None
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    return domain, bus, device, function


def _identify(smi: Any, handle: Any) -> Processor:
    bus = _bus_of(smi.amdsmi_get_gpu_device_bdf(handle))
    if bus is None:
        raise ValueError("AMD SMI gives no PCI bus id")
    asic = ask(smi, "amdsmi_get_gpu_asic_info", handle)
    serial = _serial(asic.get("asic_serial"))
    names = {serial}
    if serial:  # else the UUID is made of the model alone, and all GPUs of a model have the same
        names |= {_plain(str(ask(smi, "amdsmi_get_gpu_device_uuid", handle) or ""))}
    model = str(asic.get("market_name", "")).replace("N/A", "")
    device_id = str(asic.get("device_id")).lower()  # a number up to ROCm 6.0, hexadecimal text since
    is_half = "MI250" in model or device_id in {"0x7408", "0x740c", str(0x7408), str(0x740C)}
    has_cpu = "MI300A" in model or device_id in {"0x74a0", str(0x74A0)}
    return Processor(handle, bus, serial, frozenset(names - {""}), model, is_half, has_cpu)


def list_processors(smi: Any) -> list[Processor]:
    """Return all processors in the order in which HIP counts them.

    That is the order of the driver's KFD nodes, not that of AMD SMI (pytorch#178398).  ROCm 6.4 reports HIP's own
    number, 6.3 the node's; before that the PCI bus is used, which is the same order on most machines.
    """
    found = []
    for handle in smi.amdsmi_get_processor_handles():
        with contextlib.suppress(*errors_of(smi)):  # hidden from this container, or fallen off the bus
            found.append(_identify(smi, handle))
    found.sort(key=lambda one: one.bus)
    for call, field in (("amdsmi_get_gpu_enumeration_info", "hip_id"), ("amdsmi_get_gpu_kfd_info", "node_id")):
        answers = [number(ask(smi, call, one.handle).get(field), (32,)) for one in found]
        places = [place for place in answers if place is not None]
        if len(places) == len(found):
            return [one for _, one in sorted(zip(places, found, strict=True), key=itemgetter(0))]
    return found


def _shown(listed: str | None, processors: Sequence[Processor]) -> tuple[list[Processor], int]:
    """Return what a list of indices and UUIDs shows, up to its first invalid entry, and how long it is."""
    if listed is None:
        return list(processors), len(processors)
    shown: list[Processor] = []
    entries = [entry.strip() for entry in listed.split(",")]
    for entry in entries:
        if entry.isdecimal() and int(entry) < len(processors):
            shown.append(processors[int(entry)])
        elif named := [one for one in processors if _plain(entry) in one.names]:
            shown.append(named[0])
        else:
            break
    return shown, len(entries)


def find(site: Site, processors: Sequence[Processor]) -> Processor:
    """Return the processor of the rank: the one that torch uses, else by the processors shown to the rank.

    Raises:
        DeviceUnavailable: there is none for this rank.
    """
    if not processors:
        raise DeviceUnavailable(advice(None))
    if site.cuda_pci_bus_id or site.cuda_uuid:
        return _find_by_torch(site, processors)
    # ROCm's runtime hides first, HIP counts among the rest, and reads CUDA's variable like its own.
    shown, entries = _shown(site.rocr_visible_devices, processors)
    hip = site.hip_visible_devices if site.hip_visible_devices is not None else site.visible_devices
    if hip is not None:
        shown, entries = _shown(hip, shown)
    lists = {"ROCR": site.rocr_visible_devices, "HIP": site.hip_visible_devices, "CUDA": site.visible_devices}
    set_to = [f"{name}_VISIBLE_DEVICES={text!r}" for name, text in lists.items() if text is not None]
    return shown_to_rank(shown, entries, site, " and ".join(set_to) or "this machine", len(processors))


def _find_by_torch(site: Site, processors: Sequence[Processor]) -> Processor:
    bus = _bus_of(site.cuda_pci_bus_id)
    names = {_plain(site.cuda_uuid), _without_ascii(_plain(site.cuda_uuid))}
    for matching in (
        [one for one in processors if bus is not None and one.bus[:3] == bus[:3]],
        [one for one in processors if one.names & names],
    ):
        if matching:
            return matching[0]
    which = site.cuda_pci_bus_id or site.cuda_uuid
    raise DeviceUnavailable(f"AMD SMI does not list the GPU {which} that torch uses: is it hidden from this container?")


def whole(processor: Processor, processors: Sequence[Processor]) -> Processor:
    """Return the GPU of a partition: they differ in the function of their bus id only, and share its sensors."""
    return min((one for one in processors if one.bus[:3] == processor.bus[:3]), key=lambda one: one.bus)


# --- whose energy


def is_second_die(smi: Any, processor: Processor) -> bool:
    """Whether this is the die of a card that reports neither power nor energy: the other reports both dies'.

    The driver sets them to 0 there (aldebaran_get_gpu_metrics); rocm-smi, too, uses the zero of the counter.
    """
    if not processor.is_half:
        return False
    joules = joules_of(ask(smi, "amdsmi_get_energy_count", processor.handle))
    return joules == 0 and not any(ask_group(smi, power, processor.handle).values())


def first_die(smi: Any, second: Processor, processors: Sequence[Processor]) -> Processor | None:
    """Return the die that reports for a second one, where it is visible.

    AMD SMI has no name for the card, but the dies of a card are joined by four links, and no others by more
    than two; the driver reports 50 GB/s a link (amdgpu_amdkfd_get_xgmi_bandwidth_mbytes).  Where it does not, the
    die before on the PCI bus is assumed, as on machines that were described (ml-energy/zeus#203).
    """
    others = [one for one in processors if one.is_half and one.bus != second.bus]
    call = "amdsmi_get_minmax_bandwidth_between_processors"
    widths = [number(ask(smi, call, second.handle, one.handle).get("max_bandwidth")) for one in others]
    if any(widths):
        joined = [one for one, width in zip(others, widths, strict=True) if (width or 0) >= _FOUR_LINKS_MB_PER_S]
    else:
        joined = sorted((one for one in others if one.bus < second.bus), key=lambda one: one.bus)[-1:]
    return joined[0] if joined and not is_second_die(smi, joined[0]) else None
