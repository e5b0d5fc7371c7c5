"""Copies between a GPU and pinned host memory that also take the PCIe links of idle GPUs of the host."""

from fusco.offload.activations import offload_activations as offload_activations
from fusco.offload.copier import Copier as Copier
from fusco.offload.copy import Copy as Copy
from fusco.offload.settings import OffloadSettings as OffloadSettings
from fusco.offload.settings import RelayBudget as RelayBudget
from fusco.offload.tensors import copier_of as copier_of
from fusco.offload.tensors import copy_from_host as copy_from_host
from fusco.offload.tensors import copy_to_host as copy_to_host
