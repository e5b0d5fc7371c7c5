"""How the ranks of a new communicator meet: who is on which machine, and whether all want the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fusco.engine.record import Agreement, check_agreement
from fusco.hosts import host_identity, reachable_address
from fusco.transport.roll_call import RollCall


@dataclass(frozen=True)
class Introduction:
    """What a rank knows once all have met.

    Attributes:
        hosts: the machine of each rank, by a name that two ranks share if they can share memory.
        listen_on: the address by which the other ranks reach this one.

    """

    hosts: list[str]
    listen_on: str


def introduce(roll: RollCall, agreement: Agreement) -> Introduction:
    """Meet all ranks.

    Args:
        roll: finds them.
        agreement: what all must want alike; may carry a rejection, for which all other ranks raise.

    Raises:
        MismatchError, RejectedInputError: see ``check_agreement``.

    """
    hellos = roll.gather("hello", {"agreement": asdict(agreement), "host": host_identity()})
    check_agreement([Agreement(**hello["agreement"]) for hello in hellos], roll.rank)
    hosts = [hello["host"] for hello in hellos]
    listen_on = "127.0.0.1" if len(set(hosts)) == 1 else reachable_address(roll.store_host)
    return Introduction(hosts, listen_on)
