"""Testbed: hosts with rate-limited NICs, made of the network namespaces of one machine.

``Testbed`` makes them, ``run_job`` starts one process for each rank in them. It needs the package ``pyroute2``
(``pip install '.[testbed]'`` in a checkout), and root or user namespaces.
"""

from __future__ import annotations

from fusco.testbed.layout import (
    BORROWED_PRIORITY as BORROWED_PRIORITY,
    BORROWED_TOS as BORROWED_TOS,
    Layout as Layout,
    parse_rate as parse_rate,
)
from fusco.testbed.namespaces import Namespaces as Namespaces
from fusco.testbed.testbed import (
    RailCounters as RailCounters,
    Testbed as Testbed,
    TestbedError as TestbedError,
    run_job as run_job,
)
