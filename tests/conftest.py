"""Settings of all tests: reproducible hypothesis, one compute thread, and the option ``--device``."""

import os
import signal
from collections import Counter

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("fusco", deadline=None, derandomize=True, database=None, max_examples=50)
hypothesis.settings.load_profile("fusco")
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background jobs this way; the processes of tests would inherit it and ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Not searched for doctests: all conftests have the same module name, and attacks are no tests.
collect_ignore_glob = ["conftest.py", "*/conftest.py", "attack/*"]


# Files whose few tests take longest; other files are begun in the order of their numbers of tests, as by pytest-xdist.
BEGUN_FIRST = (
    "test_train",
    "test_fsdp_names",
    "test_fsdp",
    "test_fsdp_checkpoints",
    "test_frameworks",
    "test_fsdp_ops",
    "test_bench",
    "test_fsdp_balance",
    "test_fsdp_resume",
    "test_train_resume",
    "test_fsdp_run_state",
    "test_fsdp_trainer",
    "test_all_to_all",
    "test_decode",
    "test_communicator_lifecycle",
    "test_compiled",
    "test_site",
    "test_warm_up",
)


MOST_CHARS = 6000  # of a failure's reason, which has the traces of several ranks


def pytest_configure(config):
    """Give the processes of pytest-xdist the GPUs in different orders, since ranks 0 and 1 are in every test."""
    config.option.loadscopereorder = False
    worker, num_gpus = getattr(config, "workerinput", {}).get("workerid"), torch.cuda.device_count()
    if worker and num_gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = 2 * int(worker.removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + i) % num_gpus) for i in range(num_gpus))
    if not worker and config.option.verbose > 0:
        config.pluginmanager.register(FailureReasons(config.pluginmanager))


class FailureReasons:
    """Writes why a test fails as it ends, since a run that is cut off has no summary."""

    def __init__(self, plugins):
        self._plugins = plugins

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed and (terminal := self._plugins.get_plugin("terminalreporter")):
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.write_line(f"\n{report.nodeid} ({report.when}, {report.duration:.1f} s):")
            terminal.write_line((crash.message if crash else report.longreprtext)[:MOST_CHARS])


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "cuda-nodes"),
        default="cpu",
        help="where tests of several ranks run; on CUDA all ranks are one node, unless nodes are asked for",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    device = config.getoption("--device").removesuffix("-nodes")
    wrong, why = {
        "cuda": ("cpu_only", "not for --device cuda: it inspects the CPU engine, or runs on the CPU in any case"),
        "cpu": ("cuda_only", "only for --device cuda, which needs GPUs"),
    }[device]
    for item in items:
        if item.get_closest_marker(wrong):
            item.add_marker(pytest.mark.skip(reason=why))
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(BEGUN_FIRST)}
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (places.get(item.path.stem, len(places)), -sizes[item.path]))
