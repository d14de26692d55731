"""``forked_client.py <socket> <arguments>``: has a program run with the arguments, and ends as it does."""

import json
import os
import signal
import socket
import sys


def main(address: str, *arguments: str) -> int:
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(address)
        order = {
            "process": os.getpid(),
            "arguments": arguments,
            "folder": os.getcwd(),  # noqa: PTH109 - pathlib takes long to import
            "environment": dict(os.environ),
        }
        launcher.sendall(json.dumps(order).encode() + b"\n")
        code = int(launcher.makefile().readline())
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
