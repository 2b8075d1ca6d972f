"""One thread for every test: the models are tiny, and idle thread pools of several test processes fight for cores."""

import torch

torch.set_num_threads(1)
