"""What all tests share: reproducible hypothesis, one compute thread, helper modules that rank processes can import."""

import hypothesis
import torch

hypothesis.settings.register_profile("fusco", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fusco")
torch.set_num_threads(1)
