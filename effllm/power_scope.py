"""Whose energy makes the job's: the widest scope that every node has, each joule in it once; pure.

From the narrowest to the widest: the GPUs alone; the modules that hold them (Grace-Hopper counts GPU,
CPU and memory in one); GPUs and CPUs; what the power supplies draw, which alone is a node's power.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    nodes: dict[str, list[Device]] = {}
    for key, device in devices.items():
        nodes.setdefault(host_of.get(key, ""), []).append(device)
    offers = [_offers(node) for node in nodes.values()]
    if not any(offers):
        return Scope()
    common = [label for label in (NODE_PSU, GPU_AND_CPU, GPU) if all(label in offer for offer in offers)]
    asked = GPU if wanted == MODULE else wanted
    if asked in common:
        label, complaint = asked, ""
    else:
        label = common[0] if common else GPU
        complaint = (
            "" if wanted == AUTO else f"power scope: not every node has {wanted}; {_named(label, devices)} is used"
        )
    measured = [device for offer in offers for device in offer.get(label, ())]
    return Scope(
        _named(label, {one.key: one for one in measured}), label, frozenset(one.key for one in measured), complaint
    )


def _offers(node: Iterable[Device]) -> dict[str, list[Device]]:
    """Return what a node could give, by scope."""
    measured = [device for device in node if device.energy_method]
    supplies = [device for device in measured if device.power_scope == NODE_PSU]
    accelerators = [device for device in measured if device.power_scope in (GPU, MODULE)]
    has_gpus = any(device.is_gpu for device in node)
    # The CPU of a module is in the module's energy already.
    in_module = any(device.power_scope == MODULE for device in accelerators)
    cpus = [] if in_module else [device for device in measured if device.power_scope == CPU]
    offers: dict[str, list[Device]] = {}
    if supplies:
        offers[NODE_PSU] = supplies[:1]  # two ways to one node's supplies show the same watts
    if accelerators or not has_gpus:
        narrow = accelerators or cpus
        if narrow:
            offers[GPU] = narrow
        if accelerators and (cpus or in_module):
            offers[GPU_AND_CPU] = [*accelerators, *cpus]
        elif cpus and not has_gpus:
            offers[GPU_AND_CPU] = cpus
    return offers


def _named(label: str, devices: Mapping[str, Device]) -> str:
    """Return the scope by what is really in it: a job on CPUs alone is not called ``gpu``."""
    if label == NODE_PSU:
        return NODE_PSU
    there = {device.power_scope for device in devices.values() if device.energy_method}
    return "+".join(scope for scope in (GPU, MODULE, CPU) if scope in there) or label
