"""Copies between a GPU and pinned host memory that also take the PCIe links of idle GPUs of the host."""

from fusco.offload.activations import offload_activations as offload_activations
from fusco.offload.copier import (
    Copier as Copier,
    copier_of as copier_of,
    copy_from_host as copy_from_host,
    copy_to_host as copy_to_host,
)
from fusco.offload.copy import Copy as Copy
from fusco.offload.settings import OffloadSettings as OffloadSettings, RelayBudget as RelayBudget
