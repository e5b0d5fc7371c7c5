"""Several NICs as one link (FuseLink): messages use a host's idle NICs until their owners need them."""

from fusco.rails.address import Address as Address
from fusco.rails.channel import Channel as Channel
from fusco.rails.endpoint import Endpoint as Endpoint
from fusco.rails.limits import Limits as Limits
from fusco.rails.nccl import nccl_plugin as nccl_plugin
from fusco.rails.policy import POLICIES as POLICIES, Policy as Policy
from fusco.rails.rail import Rail as Rail, discover_rails as discover_rails
from fusco.rails.request import Request as Request
