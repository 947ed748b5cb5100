"""Cross attention in plain torch operations: a sequence's rows look at what an encoder made, all of it or some."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def cross_attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """The attention output of one sequence's rows, [rows, heads, value_width].

    query   [heads, rows, key_width]
    keys    [key_heads, length, key_width]; heads is a multiple of key_heads
    values  [key_heads, length, value_width]
    mask    [rows, length], true where a row sees; None: all rows see all. A row that sees nothing has no output
    """
    grouped = query.reshape(keys.shape[0], -1, *query.shape[1:])
    group = grouped.shape[1]
    k, v = keys[:, None].expand(-1, group, -1, -1), values[:, None].expand(-1, group, -1, -1)
    output = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return output.flatten(0, 1).transpose(0, 1)
