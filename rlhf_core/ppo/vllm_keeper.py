"""The parent of a vLLM server. `vllm_server.py` starts it as a script, in a process group of its own. It imports the
standard library only, and ends all of its group when its standard input is closed: by our process, or by its death."""

import os
import signal
import subprocess
import sys
import threading
import time

SECONDS_TO_END = 5.0


def main(command: list[str]) -> None:
    """Run the command until it ends or the standard input is closed; then nothing of the group is left."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=end_at_end_of_input, args=(server,), daemon=True).start()
    server.wait()
    os.killpg(0, signal.SIGKILL)


def end_at_end_of_input(server: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the group, and SIGKILL where the server has not ended in time."""
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGTERM)
    until = time.monotonic() + SECONDS_TO_END
    while server.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)  # the group's signal is for the server
    main(sys.argv[1:])
