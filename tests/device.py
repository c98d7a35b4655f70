"""The device that tests run their engines on: a CPU, or what BATON_TEST_DEVICE says (cuda)."""

import os

import torch

DEVICE = torch.device(os.environ.get("BATON_TEST_DEVICE", "cpu"))
