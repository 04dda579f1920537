"""One thread per process: small tensors gain nothing from two, and the machine is shared."""

import torch

torch.set_num_threads(1)
