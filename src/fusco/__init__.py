"""Expert-parallel communication for PyTorch that lays tokens out expert-major while it moves them.

Layers, each importing only those below it::

    cli                     commands, and the pages that fusco explore writes
    bench                   benchmarks and training that is measured; processes that play ranks
    integrations            the interfaces of frameworks, on the public verbs
    fsdp                    expert parallelism on FSDP2
    api                     the public verbs: validate, prepare, agree, execute
    offload                 copies between GPUs and host memory over several PCIe links
    cpu  cuda               the two backends; neither imports the other
    engine                  shared by both backends: the interface, byte streams, tasks
    simulate                how long a collective would take on a cluster: links, flows, systems
    planner  placement      routing -> plan, traffic -> lanes or groups | loads -> owners of experts
    rails                   several NICs of a host as one link
    schedule  control       bytes -> one-to-one stages | bootstrap, agreement and failure detection
    testbed                 hosts with rate-limited NICs in namespaces of one machine
    core                    plain values, errors, configuration

Importing ``fusco`` loads little more than this file and the version. ``__init__.pyi`` has the names, which load their
modules when first used.
"""

from fusco.core.public_names import public_names
from fusco.core.version import __version__ as __version__

__getattr__, __dir__, __all__ = public_names(__name__, __path__[0])
