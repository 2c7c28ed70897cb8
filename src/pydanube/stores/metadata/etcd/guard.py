"""Becomes another program that does not outlive its parent.

    guard.py PARENT_PID PID_FILE PROGRAM [ARGUMENT ...]

A script, run by a fresh interpreter: a process with threads may do very little between fork and exec. The pid stays the
same through exec, and it is in the file before the program runs, so that the next start can always find it. On Linux
the kernel kills the program when the parent ends, however it ends; elsewhere the next start has to.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, pid_file, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(parent):
        sys.exit("the parent is gone already")
    with open(f"{pid_file}.new", "w") as file:
        file.write(f"{os.getpid()}\n")
    os.replace(f"{pid_file}.new", pid_file)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
