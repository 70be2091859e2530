"""torch's FlexAttention, which skips the tiles of scores that a pattern hides."""
