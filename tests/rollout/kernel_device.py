"""Where tests of kernels run: an accelerator, or Triton's interpreter, to be chosen before Triton is imported."""

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
if DEVICE == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.4.0" and triton.__version__ < "3.7":
    pytest.skip("this Triton's interpreter cannot loop with this numpy", allow_module_level=True)
