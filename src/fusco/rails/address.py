"""The address of an endpoint."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field

from fusco.core.integers import MAX_INT32, check_integer
from fusco.rails.rail import MAX_RAILS

_SECRET_BYTES, _MAX_PORT, _MAX_WORKER = 32, 65535, 65535


@dataclass(frozen=True)
class Address:
    """Address at which an endpoint listens. Anyone who has it can connect, so pass it over a trusted channel.

    Attributes:
        worker: the worker, as numbered on its host.
        chunk_bytes: bytes of its chunks.
        rails: for each rail, IP address and port.
        secret: authenticates connections, 32 bytes.

    Raises:
        TypeError, ValueError: for a value that cannot be.
    """

    worker: int
    chunk_bytes: int
    rails: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_integer("worker", self.worker, least=0, most=_MAX_WORKER)
        check_integer("chunk_bytes", self.chunk_bytes, least=1, most=MAX_INT32)
        if not 1 <= len(self.rails) <= MAX_RAILS:
            raise ValueError(f"an address has 1 to {MAX_RAILS} rails, got {len(self.rails)}")
        for host, port in self.rails:
            ipaddress.ip_address(host)
            check_integer("a port", port, least=1, most=_MAX_PORT)
        if len(self.secret) != _SECRET_BYTES:
            raise ValueError(f"a secret has {_SECRET_BYTES} bytes, got {len(self.secret)}")

    def to_bytes(self) -> bytes:
        """Return the address as bytes, for a store or a file."""
        fields = {**vars(self), "secret": self.secret.hex()}
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Address:
        """Return the address of ``to_bytes``; ``ValueError`` for other bytes."""
        try:
            fields = json.loads(data)
            rails = tuple((str(host), int(port)) for host, port in fields["rails"])
            return cls(int(fields["worker"]), int(fields["chunk_bytes"]), rails, bytes.fromhex(fields["secret"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{bytes(data[:80])!r} is not the address of an endpoint: {error!r}") from None
