"""The scope of the job's energy: the widest scope that every node has. Each joule counts once. No I/O.

Scopes from the narrowest to the widest: GPUs; modules of GPU, CPU and memory (Grace-Hopper, measured as a whole); GPUs
and CPUs; power supplies, which measure the power of the whole node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from effllm.records.rank import CPU, GPU, MODULE, NODE_PSU, Device

GPU_AND_CPU = "gpu+cpu"
#: The choices of a node; `GPU` means modules if GPUs are in modules, and CPUs if the node has no GPU.
WIDEST_FIRST = (NODE_PSU, GPU_AND_CPU, GPU)

#: The devices of a node.
Node = Sequence[Device]


class Scope(Struct, frozen=True):
    """The devices whose energy is counted as the energy of the job."""

    label: str | None = None  # name for display; None if no device measures energy
    choice: str = ""  # one of WIDEST_FIRST, from which `keep_scope` restores this scope
    keys: frozenset[str] = frozenset()
    lacking: int = 0  # number of nodes without a sensor of this scope; their energy counts as not measured
    complaint: str = ""  # one sentence, if the sums keep another scope than the widest one


def common_scopes(nodes: Sequence[Node]) -> list[Scope]:
    """Return the scopes that every node has, the widest first; empty if no node measures energy."""
    if not any(device.energy_method for node in nodes for device in node):
        return []
    offers = [_devices_by_choice(node) for node in nodes]
    return [_scope_of_choice(offers, choice) for choice in WIDEST_FIRST if all(choice in offer for offer in offers)]


def keep_scope(nodes: Sequence[Node], choice: str) -> Scope:
    """Return the scope of a run's sums so far, by its `Scope.choice`, even if other devices have joined."""
    widest = next(iter(common_scopes(nodes)), Scope())
    if widest.choice == choice:
        return widest
    kept = _scope_of_choice([_devices_by_choice(node) for node in nodes], choice)
    if kept.lacking or not widest.label:
        complaint = (
            f"the run began with {kept.label}, but not every node can measure it: the run's energy is incomplete"
        )
    else:
        complaint = f"{widest.label} was not measured from the start of the run, so {kept.label} is still used"
    return replace(kept, complaint=f"power scope: {complaint}")


def _scope_of_choice(offers: Sequence[Mapping[str, Node]], choice: str) -> Scope:
    members = {device.key: device for offer in offers for device in offer.get(choice, ())}
    there = {device.power_scope for device in members.values() if device.energy_method}
    # The label has the actual scopes: a job on CPUs is not called ``gpu``.
    label = "+".join(scope for scope in (GPU, MODULE, CPU, NODE_PSU) if scope in there) or choice
    return Scope(label, choice, frozenset(members), sum(choice not in offer for offer in offers))


def _devices_by_choice(node: Node) -> dict[str, Node]:
    """Return the devices of a node for each possible `Scope.choice`, including devices without a sensor.

    The narrowest choice always exists: a GPU without a sensor makes the sum incomplete, not smaller.
    """
    measured = [device for device in node if device.energy_method]
    supplies = [device for device in measured if device.power_scope == NODE_PSU]
    cpus = [device for device in measured if device.power_scope == CPU]
    gpus = [device for device in node if device.is_gpu]
    # The energy of a module already includes its CPU.
    in_module = any(device.power_scope == MODULE for device in measured)
    offers: dict[str, Node] = {GPU: gpus or cpus or [device for device in node if not device.only_power]}
    if gpus and in_module:
        offers[GPU_AND_CPU] = gpus
    elif cpus:
        offers[GPU_AND_CPU] = [*gpus, *cpus]
    if supplies:
        offers[NODE_PSU] = supplies[:1]  # two sensors of one node's supplies show the same watts
    return offers
