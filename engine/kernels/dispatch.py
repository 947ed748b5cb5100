"""Chooses the implementation of attention and of products: C++ or Triton where the device can run it, else torch."""

from __future__ import annotations

import logging
from functools import cache

import torch

from engine.kernels import linear, reference
from engine.kernels.attention_input import AttentionFunction
from engine.kernels.blocks import BlockReader, TorchBlocks
from engine.kernels.cell_kernels import KernelUnavailable
from engine.kernels.cpu.attention.attention import FORMATS, NativeAttention
from engine.kernels.cpu.build import libraries
from engine.kernels.cpu.products.linear import NativeLinear
from engine.kernels.cpu.products.row_invariant import NativeProduct
from engine.kernels.device_products import DeviceProducts, TorchProducts
from engine.kernels.linear import PrepareMatrices
from engine.kernels.products import RowInvariantProduct, TiledProduct

log = logging.getLogger("cellar.engine")
NO_VECTORS = "the C++ kernel needs AVX2, AVX-512 or NEON, which this processor has not"


def attention_kernel(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: str = "cpu", *, one_tile: bool = False
) -> AttentionFunction:
    """The fastest attention on a device for a model's dtype and KV dtype. May build the kernel, in seconds.

    one_tile  on a GPU, whether rows of prompts have the bits of decoded ones
    """
    if dtype == torch.float64:
        return reference.attend
    if device.startswith("cuda"):
        return device_attention(dtype, kv_dtype, device, one_tile=one_tile)
    return best_attention() if device == "cpu" and kv_dtype in FORMATS else reference.attend


@cache
def device_attention(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: str, *, one_tile: bool = False
) -> AttentionFunction:
    """The Triton kernels, or torch and one warning in the log."""
    try:
        # Only torch for GPUs brings triton.
        from engine.kernels.triton.check import checked_kernels

        return checked_kernels(dtype, kv_dtype, torch.device(device), one_tile=one_tile)
    except (ImportError, KernelUnavailable) as error:
        log.warning("attention on %s is several times slower, in torch instead of Triton: %s", device, error)
        return reference.attend


def device_products(dtype: torch.dtype, device: str, *, one_tile: bool = False) -> DeviceProducts:
    """The Triton kernels for quantised weights and activations of a dtype, or torch and a warning in the log.

    one_tile  whether a row has the same bits in any batch
    """
    target = torch.device(device)
    if target.type != "cuda":
        return TorchProducts(target)
    try:
        from engine.kernels.triton.linear import TritonProducts

        return TritonProducts(target, dtype, one_tile=one_tile)
    except ImportError as error:
        log.warning("quantised weights on %s are unpacked at each use, as Triton is missing: %s", device, error)
        return TorchProducts(target)


@cache
def best_attention() -> AttentionFunction:
    """The C++ kernel, or torch and one warning in the log."""
    try:
        return native_attention()
    except libraries.LibraryUnavailable as error:
        log.warning("attention takes about twice the processor time, in torch instead of C++: %s", error.reason)
        return reference.attend


def native_attention() -> AttentionFunction:
    """The C++ kernel. Raises LibraryUnavailable."""
    variant = libraries.variants("attention")[0]
    if variant == "generic":
        # Measured: without wide vectors it is slower than torch.
        raise libraries.LibraryUnavailable(NO_VECTORS)
    library = libraries.library("attention")
    try:
        return NativeAttention(library).attend
    except OSError as error:
        raise libraries.LibraryUnavailable(f"the library cannot be loaded: {error}") from error


@cache
def best_linear() -> PrepareMatrices:
    """The C++ kernel for products with quantised matrices, or torch and one warning in the log."""
    try:
        return native_linear()
    except libraries.LibraryUnavailable as error:
        log.warning(
            "quantised weights take several times the processor time of float32 ones, in torch instead of C++: %s",
            error.reason,
        )
        return linear.prepare


@cache
def best_blocks() -> BlockReader:
    """Reads the blocks of GGUF files in C++, or in torch."""
    try:
        return _linear_library()
    except libraries.LibraryUnavailable:
        return TorchBlocks()


def native_linear() -> PrepareMatrices:
    """The C++ kernel for products with quantised matrices. Raises LibraryUnavailable."""
    return _linear_library().prepare


def _linear_library() -> NativeLinear:
    library = libraries.library("linear")
    try:
        return NativeLinear(library)
    except OSError as error:
        raise libraries.LibraryUnavailable(f"the library cannot be loaded: {error}") from error


def device_row_invariant(device: str) -> RowInvariantProduct:
    """The Triton kernels for row-invariant products, or torch in tiles and a warning in the log."""
    if torch.device(device).type != "cuda":
        return TiledProduct()
    try:
        from engine.kernels.triton.invariant import TritonProduct

        return TritonProduct()
    except ImportError as error:
        log.warning("products on %s are computed in tiles by torch, as Triton is missing: %s", device, error)
        return TiledProduct()


@cache
def best_row_invariant() -> RowInvariantProduct:
    """The C++ kernel for row-invariant products, or torch in tiles."""
    try:
        return native_product()
    except libraries.LibraryUnavailable:
        return TiledProduct()


def native_product() -> RowInvariantProduct:
    """The C++ kernel for row-invariant products. Raises LibraryUnavailable."""
    variant = libraries.variants("linear")[0]
    if variant == "generic":
        raise libraries.LibraryUnavailable(NO_VECTORS)
    library = libraries.library("linear")
    try:
        return NativeProduct(library)
    except OSError as error:
        raise libraries.LibraryUnavailable(f"the library cannot be loaded: {error}") from error
