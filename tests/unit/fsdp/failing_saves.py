"""A save in a forked process that is killed, or gets an error, at a chosen change of a file."""

import errno
import os
import signal
import sys
import traceback
import warnings

# What changes a file system, and has an audit event.
_EVENTS = {"os.rename", "os.remove", "open"}


def save_and_fail(save, moment, fail, text="No space left"):
    """Save in a forked process, in which ``fail`` is called at the n-th change of a file; return whether it was."""
    child = os.fork()
    if child == 0:
        num_changes = 0

        def watch(event, arguments):
            nonlocal num_changes
            if event not in _EVENTS or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                return
            num_changes += 1
            if num_changes == moment:
                fail()

        try:
            warnings.simplefilter("ignore")
            sys.addaudithook(watch)
            save()
        except OSError as error:
            os._exit(0 if text in str(error) else 3)
        except BaseException:  # noqa: BLE001  the parent sees the exit code
            traceback.print_exc()
            os._exit(4)
        os._exit(int(num_changes < moment))  # errors that do not matter are suppressed
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {0, 1, -signal.SIGKILL}
    return status != 1


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
