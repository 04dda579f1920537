"""`launch`: a function on several ranks of this machine, from a script or a notebook; on a cluster, and over several hosts, use torchrun.

Only the door: it is imported with the package and must cost nothing. The work is in `trainer_kit.ranks.launching`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def launch(fn: Callable[..., Any], num_processes: int, *args: Any) -> list[Any]:
    """Run `fn(*args)` in `num_processes` ranks of this machine and return the results by rank.

    In a rank the variables of a launcher are set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so that a Trainer, or
    `MeshStrategy(...).build()`, finds its mesh. Threads are shared out: cores / processes for each, unless OMP_NUM_THREADS says otherwise.

    fn: a function at the top level of a module or of the script, whose call of `launch` is under `if __name__ == "__main__":`; in a
    notebook any function. Results, and arguments outside of notebooks, are pickled.

    The first error of a rank ends all of them within ten seconds and is raised here as a StateError, with the rank's error as its
    `__cause__`. Ctrl-C interrupts the ranks and ends them. SIGTERM is passed on to them, and `Interrupted` is raised if it ends them.
    Raises ConfigurationError for a function that can't be sent, UnsupportedError for a notebook's function when this process already
    uses an accelerator, StateError inside of a rank.
    """
    from trainer_kit.ranks.launching import Launch

    return Launch(fn, num_processes, args).run()
