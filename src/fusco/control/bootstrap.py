"""Bootstrap of a communicator: exchange host, device and fingerprint of every rank."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterable
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from fusco.control.fingerprint import CollectiveFingerprint, check_fingerprints
from fusco.control.member_gather import Gather
from fusco.core.environment import SHARE_GPUS, may_share_gpus
from fusco.core.threads import in_thread

# An address reserved for documentation (RFC 5737): the route to it is the default route.
_DOCUMENTATION_ADDRESS = "192.0.2.1"
_RESOLVING_S = 10.0  # a resolver asks the next name server after 5 s


@dataclass(frozen=True)
class DeviceIdentity:
    """A rank's device: ``name`` is valid in the rank's process, ``uuid`` on the whole machine.

    The CPU has no ``uuid``, nor does a GPU that may be shared.
    """

    name: str
    uuid: str

    @classmethod
    def of(cls, device: torch.device) -> DeviceIdentity:
        """Return the identity of a device of this process."""
        is_exclusive = device.type == "cuda" and not may_share_gpus()
        return cls(str(device), uuid_of(device) if is_exclusive else "")


def uuid_of(device: torch.device) -> str:
    """Return a CUDA device's UUID, which does not depend on its index in a process."""
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True)
class PeerInfo:
    """Hosts, devices and networks of all ranks."""

    hosts: list[str]  # the machine of each rank, by a name that two ranks share if they can share memory
    devices: list[DeviceIdentity]  # the device of each rank
    listen_on: str  # the address by which the other ranks reach this one
    networks: list[int] = field(default_factory=list)  # the network namespace of each rank, on its host


def exchange_peer_info(store_gather: Gather, fingerprint: CollectiveFingerprint, device: DeviceIdentity) -> PeerInfo:
    """Exchange hosts, devices and fingerprints with all ranks.

    ``fingerprint`` has values that must be equal on all ranks; with a rejection, all other ranks raise. Raises as
    ``check_fingerprints``.
    """
    network = os.stat("/proc/self/ns/net").st_ino
    local = {"fingerprint": asdict(fingerprint), "host": host_identity(), "device": asdict(device), "network": network}
    peers = store_gather.all_gather("bootstrap", local)
    fingerprints = [CollectiveFingerprint(**peer["fingerprint"]) for peer in peers]
    check_fingerprints(fingerprints, store_gather.rank, store_gather.members)
    hosts = [peer["host"] for peer in peers]
    listen_on = "127.0.0.1" if len(set(hosts)) == 1 else reachable_address(store_gather.store_host)
    devices = [DeviceIdentity(**peer["device"]) for peer in peers]
    return PeerInfo(hosts, devices, listen_on, [peer["network"] for peer in peers])


def check_devices(peer_info: PeerInfo, numbers: Iterable[int]) -> None:
    """Raise ``ValueError``, the same on all ranks, if two ranks have one GPU that may not be shared."""
    gpu_to_rank: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, host, device in zip(numbers, peer_info.hosts, peer_info.devices, strict=True):
        other, name = gpu_to_rank.setdefault((host, device.uuid), (rank, device.name))
        if device.uuid and other != rank:
            raise ValueError(
                f"rank {other} ({name}) and rank {rank} ({device.name}) have the same GPU, "
                f"{device.uuid}, but each rank needs a GPU to itself: call "
                f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first, or pass device="cuda:i" '
                f"({SHARE_GPUS}=1 lets ranks share GPUs, which is correct but slow)"
            )


def host_identity() -> str:
    """Return a name that two processes share if and only if they can share memory: host, boot, process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


def reachable_address(towards: str) -> str:
    """Return the address by which this machine reaches host ``towards``, and is reached by machines there.

    On that host itself, or where its name resolves to a loopback address or not at all, return the address of the
    default route.
    """
    address = "127.0.0.1"
    for target in (towards, _DOCUMENTATION_ADDRESS):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((_resolved(target), 9))  # selects a route, sends nothing
                address = str(probe.getsockname()[0])
            except OSError:
                continue  # no such name, or no route
        if not address.startswith("127."):
            break
    return address


def _resolved(name: str) -> str:
    """Return the IPv4 address of a host; ``OSError`` if none is found within a limit, which resolvers lack."""
    lookup = in_thread(lambda: socket.gethostbyname(name), f"the resolution of the host name {name!r}")
    if not wait([lookup], _RESOLVING_S).done:
        text = f"the host name {name!r} has not been resolved within {_RESOLVING_S:g} s; ranks use the default route"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        raise TimeoutError(text)
    return lookup.result()
