"""Shared fixtures: a random tiny model in memory and as a folder. The builders are in `tiny_random`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU, Triton kernels run in their interpreter; it must be chosen before anything imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")

import pytest
import tiny_random
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_random_model():
    """A random `WanTransformer3DModel`: 2 blocks, 2 heads of 16. Shared: do not change it."""
    return tiny_random.random_transformer()


@pytest.fixture(scope="session")
def tiny_random_vae():
    """A random `AutoencoderKLWan`: 8x space, 4x time, 4 latent channels. Shared: do not change it."""
    return tiny_random.random_vae()


@pytest.fixture(scope="session")
def tiny_random_text():
    """A text encoder double: one row a word, 8 rows of 16, zero rows after the prompt."""
    return tiny_random.HashTextEncoder()


@pytest.fixture(scope="session")
def tiny_random_folder(tmp_path_factory):
    """A complete model folder on disk, as `streamvid.load` takes it. Shared: do not change it."""
    return tiny_random.save_folder(tmp_path_factory.mktemp("models") / "tiny_random")
