"""Makes a forward of transformers' modules batch invariant: the bits of a row do not depend on the other rows.

Quantised layers round rows to 8 bits, which amplifies float32 rounding: a row that differs in its last bit may get
another code, and the sequence another token. Inside `RowInvariant` the functions of torch that compute a row
differently in another batch are replaced:
* matrix products, which choose an algorithm by shape (engine/kernels/products.py);
* softmax: its sums depend on the number and order of positions;
* activations that compute vectorised and remaining elements differently;
* reductions along a row: their order depends on the strides.
Other elementwise functions are row-invariant already (measured). `StableTopK` resolves the ties of selections alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import transformers.integrations.moe  # noqa: F401  (registers an operation)
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.products import RowInvariantProduct

# Argument beyond which softplus is the identity (torch's default).
_SOFTPLUS_THRESHOLD = 20.0
# Exponents below it are treated as zero weight: e^-60 is lost next to 1, and denormal products are slow.
_MIN_EXPONENT = -60.0
# Fixed-point units of the largest weight in which a softmax is summed: float64 holds sums of 2 million such weights.
_SUM_SCALE = 2.0**32
# Terms that are added one by one, such as the outputs of a token's experts.
_FEW_TERMS = 32


# Operations of torch, by their names in aten, whose rounding depends on the number of rows, on strides or on offsets.
_ROUNDED_BY_BATCH = frozenset(
    (
        *("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "inner"),
        *("tensordot", "einsum", "bilinear", "chain_matmul", "linalg_multi_dot", "_grouped_mm", "grouped_mm_fallback"),
        *("scaled_dot_product_attention", "softmax", "log_softmax", "logsumexp"),
        *("conv1d", "conv2d", "conv3d", "convolution", "_convolution"),
        *("sum", "nansum", "mean", "norm", "linalg_norm", "linalg_vector_norm", "var", "std", "var_mean", "rms_norm"),
        *("silu", "gelu", "elu", "mish", "softplus", "sigmoid"),
    )
)

_REDUCTIONS: tuple[Callable[..., Any], ...] = (
    *(torch.sum, torch.mean, torch.norm, torch.linalg.vector_norm, functional.rms_norm, functional.normalize),
    *(Tensor.sum, Tensor.mean, Tensor.norm),
)


class RowInvariant(TorchFunctionMode):
    """A reusable context for forwards in float32 or fewer bits.

    is_replacing  whether a replacement runs, in the one thread that computes
    """

    is_replacing: ClassVar[bool] = False

    def __init__(self, product: RowInvariantProduct) -> None:
        super().__init__()
        products, sums = _InvariantProducts(product), _InvariantSums(product)
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {
            functional.linear: products.linear,
            functional.scaled_dot_product_attention: products.attend,
            torch.matmul: products.matmul,
            torch.mm: products.matmul,
            torch.bmm: products.matmul,
            torch.addmm: products.addmm,
            torch.baddbmm: products.baddbmm,
            Tensor.matmul: products.matmul,
            Tensor.__matmul__: products.matmul,
            Tensor.mm: products.matmul,
            Tensor.bmm: products.matmul,
            Tensor.addmm: products.addmm,
            Tensor.baddbmm: products.baddbmm,
            # functional.grouped_mm is a Python function that calls it, and no function mode receives that call.
            torch._grouped_mm: products.grouped_mm,
            torch.ops.transformers.grouped_mm_fallback: products.grouped_mm,
            torch.softmax: _softmax,
            Tensor.softmax: _softmax,
            functional.softmax: _functional_softmax,
            functional.silu: _silu,
            functional.gelu: _gelu,
            functional.elu: _elu,
            functional.mish: _mish,
            functional.softplus: _softplus,
            functional.sigmoid: _sigmoid,
            torch.sigmoid: _sigmoid,
            Tensor.sigmoid: _sigmoid,
            torch.special.expit: _sigmoid,
            **{reduce: _contiguous(reduce) for reduce in _REDUCTIONS},
            torch.sum: sums.sum,
            Tensor.sum: sums.sum,
            torch.mean: sums.mean,
            Tensor.mean: sums.mean,
            functional.normalize: sums.normalize,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the row-invariant replacement of `func`, or `func`."""
        replacement = self._functions.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        RowInvariant.is_replacing = True
        try:
            return replacement(*args, **(kwargs or {}))
        finally:
            RowInvariant.is_replacing = False


class UnreplacedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the block, records operations that may round a row by the other rows and ran outside of replacements.

    Recurrences run token by token inside `DisableTorchFunction`: their calls have one shape and need no replacement.

    names  of the recorded operations of torch
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`, and records it."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_invariant = RowInvariant.is_replacing or torch._C._is_torch_function_all_disabled()
        if name in _ROUNDED_BY_BATCH and not is_invariant and isinstance(result, Tensor) and result.is_floating_point():
            self.names.add(name)
        return result


class _InvariantProducts:
    """Torch's matrix products, computed by a row-invariant kernel."""

    def __init__(self, product: RowInvariantProduct) -> None:
        self._product = product

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """functional.linear."""
        rows = self._product.linear(input.reshape(-1, input.shape[-1]), weight)
        product = rows.view(*input.shape[:-1], weight.shape[0])
        return product if bias is None else product + bias

    def matmul(self, input: Tensor, other: Tensor) -> Tensor:
        """torch.matmul."""
        if input.dim() < 2 or input.shape[-1] == 1 or not input.is_floating_point():
            return torch.matmul(input, other)
        if other.dim() == 1:
            return self.linear(input, other[None])[..., 0]
        rows, columns = input.shape[-2], other.shape[-1]
        if other.dim() == 2:
            return self.linear(input, other.mT)
        if other.dim() == 3 and len(other) == 1 and input.dim() > 2:
            # Matrices that share the other operand are rows of one product.
            product = self._product.batch(input.reshape(1, -1, input.shape[-1]), other)
            return product.view(*input.shape[:-1], columns)
        if other.shape[-3] == 1 and input.dim() >= other.dim():
            product = self.matmul(input.flatten(-3, -2), other.squeeze(-3))
            return product.view(*product.shape[:-2], -1, rows, columns)
        shape = (input[..., 0, 0] + other[..., 0, 0]).shape
        left, right = (operand.expand(*shape, *operand.shape[-2:]).flatten(0, -3) for operand in (input, other))
        return self._product.batch(left, right).view(*shape, rows, columns)

    def addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """torch.addmm."""
        product = self.matmul(mat1, mat2) * alpha
        return product if beta == 0 else product + input * beta

    def baddbmm(self, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """torch.baddbmm."""
        return self.addmm(input, batch1, batch2, beta=beta, alpha=alpha)

    def grouped_mm(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """functional.grouped_mm of rows in groups."""
        product = self._product.grouped(mat_a, mat_b, offs)
        product = product if bias is None else product + bias
        return product if out_dtype is None else product.to(out_dtype)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """functional.scaled_dot_product_attention."""
        if enable_gqa:
            group = query.shape[-3] // key.shape[-3]
            key, value = (heads.repeat_interleave(group, -3) for heads in (key, value))
        scores = self.matmul(query, key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
        weights = _softmax(scores, -1)
        # A row with all keys masked gets zeros.
        return self.matmul(weights.nan_to_num(0.0) if attn_mask is not None else weights, value)


class _InvariantSums:
    """Torch's sums along a dimension."""

    def __init__(self, product: RowInvariantProduct) -> None:
        self._product = product

    def sum(self, input: Tensor, *args: Any, **settings: Any) -> Tensor:
        """torch.sum."""
        sums = self._along(input, *args, **settings)
        return torch.sum(input.contiguous(), *args, **settings) if sums is None else sums.to(input.dtype)

    def mean(self, input: Tensor, *args: Any, **settings: Any) -> Tensor:
        """torch.mean."""
        sums = self._along(input, *args, **settings)
        if sums is None:
            return torch.mean(input.contiguous(), *args, **settings)
        count = input.shape[args[0] if args else settings["dim"]]
        return sums.div(count).to(input.dtype)

    def normalize(
        self, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
    ) -> Tensor:
        """functional.normalize."""
        squares = self._along(input.float().square(), dim, keepdim=True) if p == 2.0 and out is None else None
        if squares is None:
            return functional.normalize(input.contiguous(), p, dim, eps, out)
        return (input / squares.sqrt().clamp_min(eps)).to(input.dtype)

    def _along(self, input: Tensor, dim: Any = None, keepdim: bool = False, **settings: Any) -> Tensor | None:
        """The sums along one dimension of floating-point numbers, float32; None: torch computes them."""
        if not isinstance(dim, int) or settings or not input.is_floating_point() or input.dtype == torch.float64:
            return None
        moved = input.movedim(dim, -1)
        if not self._product.sums_rows:
            return None
        if moved.shape[-1] <= _FEW_TERMS:
            sums = torch.zeros(moved.shape[:-1], dtype=torch.float32, device=input.device)
            for part in moved.unbind(-1):
                sums += part
        else:
            sums = self._product.sums(moved.reshape(-1, moved.shape[-1])).view(moved.shape[:-1])
        return sums.unsqueeze(dim) if keepdim else sums


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """torch.softmax with sums of whole numbers, which no order of positions or sinks changes."""
    wide = input.float()
    below = wide - wide.amax(dim, keepdim=True)
    powers = torch.exp(below.masked_fill(below < _MIN_EXPONENT, -torch.inf))
    total = (powers.double() * _SUM_SCALE).round_().sum(dim, keepdim=True) / _SUM_SCALE
    return (powers / total.float()).to(dtype or input.dtype)


def _functional_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """functional.softmax."""
    return functional.softmax(input, dim, dtype=dtype) if dim is None else _softmax(input, dim, dtype)


def _sigmoid(input: Tensor) -> Tensor:
    """torch.sigmoid."""
    wide = input.float()
    return (1 / (1 + torch.exp(-wide))).to(input.dtype)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    """functional.silu."""
    wide = input.float()
    return (wide / (1 + torch.exp(-wide))).to(input.dtype)


def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """functional.gelu."""
    wide = input.float()
    if approximate == "none":
        inner = torch.erf(wide * 0.5**0.5)
    else:
        inner = torch.tanh(0.7978845608028654 * (wide + 0.044715 * (wide * wide * wide)))
    return (0.5 * wide * (1 + inner)).to(input.dtype)


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """functional.elu."""
    wide = input.float()
    return torch.where(wide > 0, wide, alpha * torch.expm1(wide)).to(input.dtype)


def _mish(input: Tensor, inplace: bool = False) -> Tensor:
    """functional.mish."""
    wide = input.float()
    return (wide * torch.tanh(_softplus(wide))).to(input.dtype)


def _softplus(input: Tensor, beta: float = 1.0, threshold: float = _SOFTPLUS_THRESHOLD) -> Tensor:
    """functional.softplus."""
    scaled = input.float() * beta
    return torch.where(scaled > threshold, scaled, torch.log1p(torch.exp(scaled))).div(beta).to(input.dtype)


def _contiguous(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction over contiguous tensors."""

    def reduced(*args: Any, **settings: Any) -> Any:
        return reduce(
            *(argument.contiguous() if isinstance(argument, Tensor) else argument for argument in args), **settings
        )

    return reduced


class StableTopK(TorchFunctionMode):
    """Inside the block, `topk` selects the first of equal scores; selections without a tie at their end are torch's
    own.

    torch leaves the choice among equals open, and chooses others in a longer row. Sparse attention meets ties all the
    time (repeated tokens, heads with zero scores), so chunks of a prompt would change the text.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`, and corrects the result of `topk`."""
        result = func(*args, **(kwargs or {}))
        if func is torch.topk or func is Tensor.topk:
            return _first_of_ties(result, *args, **(kwargs or {}))
        return result


def _first_of_ties(
    result: Any, scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, **_: Any
) -> Any:
    """The result of `topk`, with ties at its end resolved in favour of the first positions."""
    values, indices = result
    if not largest or k == 0 or k == scores.shape[dim]:
        return result
    last = values.amin(dim, keepdim=True)
    above, equal = scores > last, scores == last
    if last.isnan().any() or not (above | equal).sum(dim).gt(k).any():
        return result
    selected = above | (equal & (equal.cumsum(dim) <= k - above.sum(dim, keepdim=True)))
    # By row, with equally many indices in each.
    rows = selected.movedim(dim, -1)
    positions = rows.nonzero()[:, -1].view(*rows.shape[:-1], k).movedim(-1, dim)
    chosen = scores.gather(dim, positions)
    if sorted:
        chosen, order = chosen.sort(dim=dim, descending=True, stable=True)
        positions = positions.gather(dim, order)
    return type(result)((chosen, positions))
