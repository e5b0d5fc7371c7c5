"""``fusco bench host``: the time of a dispatch and a combine on the host, without a device."""
