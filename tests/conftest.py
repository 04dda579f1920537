"""One thread per process: small tensors gain nothing from two, and the machine is shared. Processes that tests start inherit it."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
