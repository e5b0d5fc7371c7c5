"""The interface on which gloo listens."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from fusco.cpu.gloo import _options


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, {"hostname": "10.0.0.7"}),
        ("", {"hostname": "10.0.0.7"}),
        ("rail1", {"interface": "rail1"}),
        ("rail1, rail2", {"interface": "rail1"}),
    ],
)
def test_gloo_listens_where_peers_reach_it_or_as_the_user_says(monkeypatch, variable, expected):
    made, loopback = [], dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    monkeypatch.setattr(
        dist.ProcessGroupGloo, "create_device", staticmethod(lambda **where: made.append(where) or loopback)
    )
    if variable is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    _options(timedelta(seconds=1), "10.0.0.7")
    assert made == [expected]
