"""Several NICs as one link (FuseLink): messages use a host's idle NICs until their owners need them."""

from fusco.rails.channel import Channel as Channel, Request as Request
from fusco.rails.endpoint import Endpoint as Endpoint
from fusco.rails.nccl import nccl_plugin as nccl_plugin
from fusco.rails.policy import POLICIES as POLICIES, Limits as Limits, Policy as Policy
from fusco.rails.rail import Address as Address, Rail as Rail, discover_rails as discover_rails
