"""Whose energy makes the job's: the widest scope that every node has, each joule in it once; pure.

From the narrowest to the widest: the GPUs alone; the modules that hold them (Grace-Hopper counts GPU,
CPU and memory in one); GPUs and CPUs; what the power supplies draw, which alone is a node's power.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from effllm.schema import CPU, GPU, MODULE, NODE_PSU, Device

GPU_AND_CPU = "gpu+cpu"
AUTO = "auto"
#: What ``EFFICIENTLLM_POWER_SCOPE`` may be.
CHOICES = (AUTO, GPU, MODULE, GPU_AND_CPU, NODE_PSU)


class Scope(Struct, frozen=True):
    """The devices whose energy is the job's."""

    label: str | None = None  # as it is shown; None: nothing measures energy
    choice: str = AUTO  # of CHOICES: what to ask for to get the same again
    keys: frozenset[str] = frozenset()
    complaint: str = ""  # one sentence, where what was asked for is not to be had


def choose(devices: Mapping[str, Device], host_of: Mapping[str, str], wanted: str) -> Scope:
    """Return the scope of a job.

    Args:
        devices: all that is known, by key.
        host_of: the node of each.
        wanted: one of `CHOICES`; where a node lacks it the widest that all have is taken, and said.
    """
    if not any(device.energy_method for device in devices.values()):
        return Scope()
    nodes: dict[str, list[Device]] = {}
    for key, device in devices.items():
        nodes.setdefault(host_of.get(key, ""), []).append(device)
    offers = [_offers(node) for node in nodes.values()]
    common = [label for label in (NODE_PSU, GPU_AND_CPU, GPU) if all(label in offer for offer in offers)]
    asked = GPU if wanted == MODULE else wanted
    label = asked if asked in common else common[0]
    counted = {device.key: device for offer in offers for device in offer[label]}
    name = _named(label, counted)
    refused = wanted not in (AUTO, label) and asked not in common
    complaint = f"power scope: not every node has {wanted}; {name} is used" if refused else ""
    return Scope(name, label, frozenset(counted), complaint)


def _offers(node: Sequence[Device]) -> dict[str, list[Device]]:
    """Return what a node could give, by scope: the devices that would count, those that measure nothing included.

    The narrowest is there always, for a GPU without a sensor is a hole in the sum and not a smaller sum.
    """
    computing = [device for device in node if not device.only_power]
    narrow = [device for device in computing if device.is_gpu] or computing
    measured = [device for device in node if device.energy_method]
    # The CPU of a module is in the module's energy already.
    in_module = any(device.power_scope == MODULE for device in measured)
    cpus = [] if in_module else [one for one in measured if one.power_scope == CPU and one not in narrow]
    supplies = [device for device in measured if device.power_scope == NODE_PSU]
    offers = {GPU: narrow}
    if cpus or in_module or (narrow and all(one.power_scope == CPU for one in narrow)):
        offers[GPU_AND_CPU] = [*narrow, *cpus]
    if supplies:
        offers[NODE_PSU] = supplies[:1]  # two ways to one node's supplies show the same watts
    return offers


def _named(label: str, devices: Mapping[str, Device]) -> str:
    """Return the scope by what is really in it: a job on CPUs alone is not called ``gpu``."""
    if label == NODE_PSU:
        return NODE_PSU
    there = {device.power_scope for device in devices.values() if device.energy_method}
    return "+".join(scope for scope in (GPU, MODULE, CPU) if scope in there) or label
