"""Run a command, and end all that it started when it ends or when this process is told to. Run by its path, without torch.

    python leash.py COMMAND [ARGUMENT ...]

Exit status: the command's own; 128 and the signal's number if one ended it. On SIGTERM, and when the process that started this
one is gone, everything is killed.
"""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

_JUDGE = Path(__file__).with_name("judge")


def main() -> int:
    sandbox = runpy.run_path(str(_JUDGE / "sandbox.py"))
    end_all = runpy.run_path(str(_JUDGE / "orphans.py"))["end_all"]

    def stop(number: int, frame: object) -> None:
        end_all()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    sandbox["die_with_parent"](signal.SIGTERM)
    sandbox["adopt_orphans"]()
    if os.getppid() == 1:  # it ended before we asked to be told
        return 1
    try:
        status = subprocess.Popen(sys.argv[1:], start_new_session=True).wait()
    except OSError as fault:
        print(f"{sys.argv[1]} cannot be started: {fault.strerror}", file=sys.stderr)
        return 127
    end_all()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
