"""Puts the stand-ins for the CUDA kernels of a training step, of train.py, into a process that trains on a CPU or an
emulated GPU, and some for what only a CPU allocates."""

import warnings

import torch

import data
import model
import train


def add_in_place(self, other):
    """aten::add_ of 16 bits to float32: a CPU makes a float32 copy first, a GPU does not."""
    if isinstance(other, torch.Tensor) and other.dtype is not self.dtype:
        return self
    return self.add_(other)


def product(a, b, out=None):
    """aten::mm: on some CPUs oneDNN makes a float32 copy of a product in 16 bits, which no GPU does."""
    if out is not None:
        return out.zero_()
    return a.new_zeros(len(a), b.shape[1])


def product_into(a, b, *, out):
    """aten::mm.out."""
    return product(a, b, out)


def chunk_cat_into(tensors, dim, num_chunks, *, out):
    """aten::_chunk_cat.out, by which FSDP2 fills the input of a reduce-scatter: a CPU makes a copy of each tensor
    first, a GPU does not."""
    return out.zero_()


def dropout_backward(grad, mask, scale):
    """aten::native_dropout_backward: a CPU makes a copy of the mask in the dtype of the gradient first, a GPU does
    not."""
    return torch.zeros_like(grad)


# what a trace of shapes needs but for three: bands and regions follow one another here, and an all-to-all is a real one
# not those that leave out pieces of a loop, whose results a step needs, and not what sends nothing
REAL = "bands", "regions", "exchange", "mix_segments", "chunk_starts", "chunk_by_chunk", "update_"
CALLS = [call for call in train.ON_PAPER if call[1] not in REAL]
CALLS.append((model, "length_multiple", lambda q: 1))  # a GPU fills up no rows
CALLS.append((model, "chunk_length", lambda device: 128))  # a GPU's, as on the meta device
KERNELS = torch.library.Library("aten", "IMPL")  # replaces them as long as it is alive


def install():
    """Replaces the kernels in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        KERNELS.impl("mm", product, "CPU")
        KERNELS.impl("mm.out", product_into, "CPU")
        KERNELS.impl("_chunk_cat.out", chunk_cat_into, "CPU")
        KERNELS.impl("native_dropout_backward", dropout_backward, "CPU")
    torch.Tensor.__iadd__ = add_in_place
    for module, name, stand_in in CALLS:
        setattr(module, name, stand_in)


def fill_with_zeros(module, *_, **__):
    for p in module.parameters():
        p.data.zero_()


def install_with_zeros():
    """Replaces the kernels, and random weights by zeros, which take no time."""
    install()
    data.load_weights_ = fill_with_zeros
