"""What torchrun starts in `test_world.py`: rank 1 fails in the first attempt, while rank 0 waits for it; the second attempt works."""

import os
import sys

from trainer_kit import MeshStrategy


def main() -> None:
    context = MeshStrategy(device="cpu").build()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with context.failures.section():
        if attempt == "0" and context.rank == 1:
            raise ValueError("bad sample 17")
        (total,) = context.host.sum([1.0])
    sys.stdout.write(f"attempt {attempt} rank {context.rank}: sum {total:g}\n")
    context.close()


if __name__ == "__main__":
    main()
