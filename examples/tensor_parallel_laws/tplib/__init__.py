"""Two layers of a model whose weights are sharded, as a library would ship them."""

from tplib.layers import column_linear, embedding

__all__ = ["column_linear", "embedding"]
