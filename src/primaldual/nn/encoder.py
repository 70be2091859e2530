"""A transformer encoder layer with any mechanism, in place of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ..primal import Primal
from .multihead import MultiheadAttention
from .projection import ConvProjection


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` whose attention is the dual of a primal layer.

    It works inside `torch.nn.TransformerEncoder` as torch's does, in training and evaluation; torch's fused encoder
    path, which would put softmax attention in its place, is never taken.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
            dtype: as torch.
        mechanism, projection, impl, scale, num_kv_heads, left_padding: as in `MultiheadAttention`. A primal with
            `residual=True` is refused: the block has that residual already.

    >>> layer = TransformerEncoderLayer(64, 8, batch_first=True, mechanism="bn")
    >>> encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    >>> encoder(torch.randn(2, 30, 64)).shape
    torch.Size([2, 30, 64])
    """

    self_attn: MultiheadAttention  # type: ignore[assignment]  # torch's is of its own class

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = nn.functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str | Primal = "softmax",
        projection: Literal["linear", "shared"] | ConvProjection = "linear",
        impl: str = "auto",
        scale: float | None = None,
        num_kv_heads: int | None = None,
        left_padding: bool = True,
    ) -> None:
        if d_model <= 0 or nhead <= 0 or d_model % nhead:
            raise ValueError(f"d_model must be a positive multiple of nhead, got d_model={d_model}, nhead={nhead}")
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias,
            device, dtype,
        )  # fmt: skip
        attention = MultiheadAttention(
            d_model, nhead, dropout=dropout, bias=bias, batch_first=batch_first, device=device, dtype=dtype,
            mechanism=mechanism, projection=projection, impl=impl, scale=scale,
            num_kv_heads=num_kv_heads, left_padding=left_padding,
        )  # fmt: skip
        if attention.primal.residual:
            raise ValueError("the encoder layer adds the residual itself; give it a Primal with residual=False")
        self.self_attn = attention

    def extra_repr(self) -> str:
        attention = self.self_attn
        feed_forward = f"dim_feedforward={self.linear1.out_features}, norm_first={self.norm_first}"
        return (
            f"d_model={attention.embed_dim}, nhead={attention.num_heads}, mechanism={attention.mechanism_name}, "
            f"{feed_forward}"
        )

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As torch; written out, so that no fused path can step in."""

        def attend(x: Tensor) -> Tensor:
            x, _ = self.self_attn(
                x, x, x, attn_mask=src_mask, key_padding_mask=src_key_padding_mask, is_causal=is_causal,
                need_weights=False,
            )  # fmt: skip
            return self.dropout1(x)

        def feed_forward(x: Tensor) -> Tensor:
            return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

        if self.norm_first:
            src = src + attend(self.norm1(src))
            return src + feed_forward(self.norm2(src))
        src = self.norm1(src + attend(src))
        return self.norm2(src + feed_forward(src))
