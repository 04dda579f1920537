"""What torchrun starts in `test_errors.py`: a fit on two ranks of which one fails in its second step.

    torchrun --nproc-per-node 2 failing_fit.py MESH RANK FOLDER

The ranks leave a file in FOLDER for what they came to, such as `told-1`.
"""

import os
import sys
import time
from pathlib import Path

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, on_mesh, t
from trainer_kit import Callback

MESH, FAILING, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
RANK = int(os.environ["RANK"])


def note(name: str) -> None:
    Path(FOLDER, f"{name}-{RANK}").touch()


class Fails(Callback):
    """What is done after the error takes longer than the other rank may wait."""

    def on_forward_backward_start(self, event):
        if RANK == FAILING and event.step == 1:
            raise ValueError("bad sample 17")

    def on_exception(self, event):
        note("told")
        if RANK == FAILING:
            time.sleep(1.0)

    def close(self):
        note("closed")


def main() -> None:
    data = Parts(*([[t(1)]] * 50 for _ in range(2)))
    trainer = on_mesh(Weight(), MeanOutput(), data, MESHES[MESH], callbacks=[Fails()])
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
