"""Where tests of kernels run: an accelerator, or Triton's interpreter, to be chosen before Triton is imported."""

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16  # the interpreter knows no bf16 products
CLOSE = {"atol": 1e-4, "rtol": 1e-5} if DEVICE == "cpu" else {"atol": 3e-2, "rtol": 2e-2}
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
if DEVICE == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.4.0" and triton.__version__ < "3.7":
    pytest.skip("this Triton's interpreter cannot loop with this numpy", allow_module_level=True)
