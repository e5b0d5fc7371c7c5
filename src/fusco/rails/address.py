"""The address of an endpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Address:
    """Address at which an endpoint listens. Anyone who has it can connect, so pass it over a trusted channel.

    Attributes:
        worker: the worker, as numbered on its host.
        chunk_bytes: bytes of its chunks.
        rails: for each rail, IP address and port.
        secret: authenticates connections, 32 bytes.
    """

    worker: int
    chunk_bytes: int
    rails: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)

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
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{bytes(data[:80])!r} is not the address of an endpoint: {error!r}") from None
