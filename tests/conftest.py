"""What every test starts from: a fixed seed, and no deadlines (no clock in a test)."""

import pytest
import torch
from hypothesis import settings


settings.register_profile("halfstep", deadline=None, max_examples=100, derandomize=True, database=None)
settings.load_profile("halfstep")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
