"""The name of PyTorch's socket for file descriptors, by which ``rendezvous`` finds it. Needs a CUDA build, no GPU."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from fusco.cuda.memory.rendezvous import SOCKET_NAME


def contains(library: Path, text: bytes) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def test_the_search_finds_a_name_only_where_it_is(tmp_path):
    library = tmp_path / "libtorch_cuda.so"
    library.write_bytes(b"\0/tmp\0/symm_mem-\0")
    assert contains(library, SOCKET_NAME.encode())
    library.write_bytes(b"\0/tmp\0/symmetric-memory-\0")
    assert not contains(library, SOCKET_NAME.encode())


def test_pytorch_names_its_socket_as_rendezvous_expects():
    if not torch.version.cuda:
        pytest.skip(f"needs a CUDA build of torch, and this is {torch.__version__}")
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libtorch*.so"))
    assert any(contains(library, SOCKET_NAME.encode()) for library in libraries), (
        f"torch {torch.__version__} has no socket named '{SOCKET_NAME}': fusco.cuda.memory.rendezvous cannot set its "
        "timeout, and a rank that dies in a rendezvous blocks peers; look for IpcChannel::get_socket_name in PyTorch"
    )
