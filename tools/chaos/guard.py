"""Becomes another program, in a network of its own, that does not outlive its parent.

    guard.py PARENT_PID NETWORK PROGRAM [ARGUMENT ...]

NETWORK is the file that keeps a network namespace, or "-". A script, run by a fresh interpreter: a process with threads
may do very little between fork and exec. The pid stays the same through exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x4000_0000


def main() -> None:
    parent, network, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(parent):
        sys.exit("the parent is gone already")
    if network != "-":
        place = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(place, CLONE_NEWNET):
            sys.exit(f"{network}: {os.strerror(ctypes.get_errno())}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
