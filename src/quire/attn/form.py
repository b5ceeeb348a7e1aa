"""What makes the graphs of two layers' attentions the same."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    turned: int  # components of a head that turn
    eps: float | None  # of head norms; None = there are none

    @property
    def columns(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim
