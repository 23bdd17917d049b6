"""No layer of a host can be replaced by ``attend`` alone: the cache belongs to the caller."""

__all__: list[str] = []
