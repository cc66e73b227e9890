"""What every test starts from: a fixed seed, and no deadlines (no clock in a test)."""

import pytest
import torch
from hypothesis import settings


settings.register_profile("halfstep", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("halfstep")


# Tensors in tests are small: a second thread costs more than it brings, and much more beside another process. Tests of
# threading set their own number.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
