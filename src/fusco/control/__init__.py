"""Control plane of a communicator, on the host, for all devices: bootstrap, records, liveness, shutdown."""
