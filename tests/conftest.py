"""One thread for every test process: several share a machine, and results must not depend on the split.
No deadline for hypothesis: a busy machine is not a failure."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("thinwire", deadline=None, derandomize=True)
settings.load_profile("thinwire")
