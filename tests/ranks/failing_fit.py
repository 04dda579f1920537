"""What torchrun starts in `test_errors_of_processes.py`: a fit on two ranks that ends in the way that the first argument names.

Each rank writes down, in the folder of the second argument, when the error happened and when it left, as seconds since the epoch.
"""

import atexit
import os
import signal
import sys
import time

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, on_mesh, t
from trainer_kit import Callback
from trainer_kit.callbacks import Signals

WAY, FOLDER = sys.argv[1:3]
RANK = int(os.environ["RANK"])


def note(name: str) -> None:
    with open(f"{FOLDER}/{name}-{RANK}", "w", encoding="utf-8") as file:
        file.write(str(time.time()))


class Fails(Callback):
    """Rank 1 fails in its second step; what is told then takes its time."""

    def on_step_end(self, event):
        if WAY == "raise" and RANK == 1 and event.step == 1:
            note("failed")
            raise ValueError("bad sample 17")
        if WAY == "blocked" and event.step == 1:
            note("blocked")
            if RANK == 1:
                time.sleep(60.0)

    def on_exception(self, event):
        note("exception")
        time.sleep(2.0)

    def close(self):
        note("close")


def main() -> None:
    data = Parts(*([[t(1)]] * 50 for _ in range(2)))
    trainer = on_mesh(Weight(), MeanOutput(), data, MESHES["fsdp" if WAY == "raise" else "replicate"], callbacks=[Fails(), Signals(True)])
    note(f"pid-{os.getpid()}")
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    atexit.register(note, "left")
    main()
