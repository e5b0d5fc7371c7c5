"""How the ranks of a new communicator meet: who is on which machine, and whether all want the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from fusco.control.fingerprint import CollectiveFingerprint, check_fingerprints
from fusco.control.hosts import host_identity, reachable_address
from fusco.control.store_gather import StoreGather
from fusco.core.shared_gpus import SHARE_GPUS, may_share_gpus


@dataclass(frozen=True)
class DeviceIdentity:
    """A rank's device: ``name`` is what the rank calls it, ``uuid`` what everybody does.

    The CPU has no ``uuid``, nor does a GPU that may be shared.
    """

    name: str
    uuid: str

    @classmethod
    def of(cls, device: torch.device) -> DeviceIdentity:
        """The identity of a device of this process."""
        is_its_own = device.type == "cuda" and not may_share_gpus()
        return cls(str(device), uuid_of(device) if is_its_own else "")


def uuid_of(device: torch.device) -> str:
    """A CUDA device's identity, whatever number it has in a process."""
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True)
class PeerInfo:
    """What a rank knows once all have met.

    Attributes:
        hosts: the machine of each rank, by a name that two ranks share if they can share memory.
        devices: of each rank.
        listen_on: the address by which the other ranks reach this one.

    """

    hosts: list[str]
    devices: list[DeviceIdentity]
    listen_on: str


def exchange_peer_info(
    store_gather: StoreGather, fingerprint: CollectiveFingerprint, device: DeviceIdentity
) -> PeerInfo:
    """Meet all ranks.

    Args:
        store_gather: finds them.
        fingerprint: what all must want alike; may carry a rejection, for which all other ranks raise.
        device: of this rank.

    Raises:
        MismatchError, RejectedInputError: see ``check_fingerprints``.

    """
    own = {"fingerprint": asdict(fingerprint), "host": host_identity(), "device": asdict(device)}
    hellos = store_gather.all_gather("hello", own)
    check_fingerprints([CollectiveFingerprint(**hello["fingerprint"]) for hello in hellos], store_gather.rank)
    hosts = [hello["host"] for hello in hellos]
    listen_on = "127.0.0.1" if len(set(hosts)) == 1 else reachable_address(store_gather.store_host)
    return PeerInfo(hosts, [DeviceIdentity(**hello["device"]) for hello in hellos], listen_on)


def check_devices(met: PeerInfo) -> None:
    """Raise ``ValueError``, the same on all ranks, if two of them have one GPU that may not be shared."""
    gpu_to_rank: dict[tuple[str, str], int] = {}
    for rank, (host, device) in enumerate(zip(met.hosts, met.devices, strict=True)):
        other = gpu_to_rank.setdefault((host, device.uuid), rank)
        if device.uuid and other != rank:
            raise ValueError(
                f"rank {other} ({met.devices[other].name}) and rank {rank} ({device.name}) have the same GPU, "
                f"{device.uuid}, but each rank needs one of its own: call "
                f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first, or pass device="cuda:i" '
                f"({SHARE_GPUS}=1 lets ranks share GPUs: right, but slow)"
            )
