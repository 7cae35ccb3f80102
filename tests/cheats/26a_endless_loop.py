"""Never returns, and ignores being asked to end. Seen by the run budget; only SIGKILL helps."""

import signal
import time

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.01)
