"""What the process imports that ranks are forked from."""

import gc

import conftest  # noqa: F401 - first: it makes the others visible
import numpy.ma  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import train  # noqa: F401

gc.freeze()  # or the first collection in each rank would copy all of it
