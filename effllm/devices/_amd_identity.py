"""The AMD GPU of a rank, and the die that reports the power of a two-die card."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from effllm.devices import DeviceUnavailable, Site, choose_for_rank
from effllm.devices._amd_readings import errors_of, joules_of, number, read_or_empty, read_power, try_call, why_no_gpu

_FOUR_LINKS_MB_PER_S = 200_000


@dataclass(frozen=True)
class Processor:
    """A device with a handle in AMD SMI: a GPU, one die of a two-die card, or a partition of a GPU."""

    handle: Any
    bus: tuple[int, int, int, int]  # domain, bus, device, function
    serial: str  # 16 hexadecimal digits, the id in ROCm's UUIDs; empty if the GPU has no id
    names: frozenset[str]  # the GPU's UUIDs in environment variables and in torch
    model: str
    is_one_of_two_dies: bool  # one die of an MI250 or MI250X
    has_cpu: bool  # True for an MI300A, whose power and energy include the CPU in its socket

    def key(self, host: str) -> str:
        """Return the UUID as rocminfo prints it; without a UUID, the host's name and the PCI bus id."""
        domain, bus, device, function = self.bus
        return f"GPU-{self.serial}" if self.serial else f"{host}-{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def _serial_digits(answer: Any) -> str:
    """Return the unique id in 16 digits; empty if the answer means "no id": zero, all bits set, or "N/A"."""
    try:
        serial = int(str(answer), 16)
    except ValueError:
        return ""
    return f"{serial:016x}" if 0 < serial < 2**64 - 1 else ""


def _plain_uuid(uuid: str) -> str:
    return uuid.strip().lower().removeprefix("gpu-").replace("-", "")


def _decode_ascii(plain: str) -> str:
    """Return the 16 hexadecimal digits of an id that HIP, and so torch, encodes as 16 ASCII letters."""
    try:
        letters = bytes.fromhex(plain).decode("ascii").lower()
    except ValueError:
        return plain
    return letters if re.fullmatch("[0-9a-f]{16}", letters) else plain


def _parse_bus_id(text: str) -> tuple[int, int, int, int] | None:
    match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.([0-9a-f]+)", text.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    return domain, bus, device, function


def _read_processor(smi: Any, handle: Any) -> Processor:
    bus = _parse_bus_id(smi.amdsmi_get_gpu_device_bdf(handle))
    if bus is None:
        raise ValueError("AMD SMI gives no PCI bus id")
    asic = try_call(smi, "amdsmi_get_gpu_asic_info", handle)
    serial = _serial_digits(asic.get("asic_serial"))
    names = {serial}
    if serial:  # without a serial number, all GPUs of a model have the same UUID
        names |= {_plain_uuid(str(try_call(smi, "amdsmi_get_gpu_device_uuid", handle) or ""))}
    model = str(asic.get("market_name", "")).replace("N/A", "")
    device_id = str(asic.get("device_id")).lower()
    is_one_of_two_dies = "MI250" in model or device_id in {"0x7408", "0x740c"}  # PCI device ids of MI250 and MI250X
    has_cpu = "MI300A" in model or device_id == "0x74a0"  # PCI device id of MI300A
    return Processor(handle, bus, serial, frozenset(names - {""}), model, is_one_of_two_dies, has_cpu)


def list_processors(smi: Any) -> list[Processor]:
    """Return all processors in HIP's order.

    HIP's order is the order of the driver's KFD nodes, not of AMD SMI (pytorch#178398).  ROCm 6.4 reports HIP's number,
    ROCm 6.3 the node's number.  For earlier releases the PCI bus order is used; on most machines it is the same order.
    """
    processors = []
    for handle in smi.amdsmi_get_processor_handles():
        with contextlib.suppress(*errors_of(smi)):  # GPUs that are hidden from this container, or lost
            processors.append(_read_processor(smi, handle))
    processors.sort(key=lambda processor: processor.bus)
    for call, field in (("amdsmi_get_gpu_enumeration_info", "hip_id"), ("amdsmi_get_gpu_kfd_info", "node_id")):
        answers = [number(try_call(smi, call, processor.handle).get(field), (32,)) for processor in processors]
        numbers = [answer for answer in answers if answer is not None]
        if len(numbers) == len(processors):
            return [processor for _, processor in sorted(zip(numbers, processors, strict=True), key=itemgetter(0))]
    return processors


def _select_listed(listed: str | None, processors: Sequence[Processor]) -> tuple[list[Processor], int]:
    """Return the processors that the entries of ``listed`` (indices or UUIDs) select, and the number of entries.

    Entries after the first invalid entry select nothing.
    """
    if listed is None:
        return list(processors), len(processors)
    shown: list[Processor] = []
    entries = [entry.strip() for entry in listed.split(",")]
    for entry in entries:
        if entry.isdecimal() and int(entry) < len(processors):
            shown.append(processors[int(entry)])
        elif with_uuid := [processor for processor in processors if _plain_uuid(entry) in processor.names]:
            shown.append(with_uuid[0])
        else:
            break
    return shown, len(entries)


def find_processor(site: Site, processors: Sequence[Processor]) -> Processor:
    """Return the processor of the rank: torch's current device, or else the processor that visibility variables select.

    Raises:
        DeviceUnavailable: there is no processor for this rank.
    """
    if not processors:
        raise DeviceUnavailable(why_no_gpu(None))
    if site.cuda_pci_bus_id or site.cuda_uuid:
        return _find_torch_device(site, processors)
    # ROCm's runtime applies ROCR_VISIBLE_DEVICES first.  HIP numbers the devices that are left.  If
    # HIP_VISIBLE_DEVICES is not set, HIP reads CUDA_VISIBLE_DEVICES.
    visible, num_entries = _select_listed(site.rocr_visible_devices, processors)
    hip_list = site.hip_visible_devices if site.hip_visible_devices is not None else site.visible_devices
    if hip_list is not None:
        visible, num_entries = _select_listed(hip_list, visible)
    lists = {"ROCR": site.rocr_visible_devices, "HIP": site.hip_visible_devices, "CUDA": site.visible_devices}
    settings = [f"{name}_VISIBLE_DEVICES={text!r}" for name, text in lists.items() if text is not None]
    return choose_for_rank(visible, num_entries, site, " and ".join(settings) or "this machine", len(processors))


def _find_torch_device(site: Site, processors: Sequence[Processor]) -> Processor:
    bus = _parse_bus_id(site.cuda_pci_bus_id)
    names = {_plain_uuid(site.cuda_uuid), _decode_ascii(_plain_uuid(site.cuda_uuid))}
    for matching in (
        [processor for processor in processors if bus is not None and processor.bus[:3] == bus[:3]],
        [processor for processor in processors if processor.names & names],
    ):
        if matching:
            return matching[0]
    which = site.cuda_pci_bus_id or site.cuda_uuid
    raise DeviceUnavailable(f"AMD SMI does not list the GPU {which} that torch uses: is it hidden from this container?")


def whole_gpu(processor: Processor, processors: Sequence[Processor]) -> Processor:
    """Return the GPU of a partition.

    The partitions of a GPU share sensors, and their bus ids differ only in the function number.
    """
    return min((part for part in processors if part.bus[:3] == processor.bus[:3]), key=lambda part: part.bus)


def is_second_die(smi: Any, processor: Processor) -> bool:
    """Whether this is the second die of a card; the first die reports the power and energy of both dies.

    The driver sets the second die's power and energy to 0 (aldebaran_get_gpu_metrics); rocm-smi also tests for 0.
    """
    if not processor.is_one_of_two_dies:
        return False
    joules = joules_of(try_call(smi, "amdsmi_get_energy_count", processor.handle))
    return joules == 0 and not any(read_or_empty(smi, read_power, processor.handle).values())


def first_die(smi: Any, second: Processor, processors: Sequence[Processor]) -> Processor | None:
    """Return the die that reports the power of a second die, or ``None`` if no such die is visible.

    AMD SMI has no id of the card, so the links between dies are counted.  The two dies of a card have four links;
    other pairs of dies have at most two links.  The driver reports 50 GB/s per link
    (amdgpu_amdkfd_get_xgmi_bandwidth_mbytes).  If no bandwidth is reported, the preceding die on the PCI bus is used,
    as on the machines of ml-energy/zeus#203.
    """
    other_dies = [die for die in processors if die.is_one_of_two_dies and die.bus != second.bus]
    call = "amdsmi_get_minmax_bandwidth_between_processors"
    bandwidths = [number(try_call(smi, call, second.handle, die.handle).get("max_bandwidth")) for die in other_dies]
    if any(bandwidths):
        pairs = zip(other_dies, bandwidths, strict=True)
        linked = [die for die, mb_per_s in pairs if (mb_per_s or 0) >= _FOUR_LINKS_MB_PER_S]
    else:
        linked = sorted((die for die in other_dies if die.bus < second.bus), key=lambda die: die.bus)[-1:]
    return linked[0] if linked and not is_second_die(smi, linked[0]) else None
