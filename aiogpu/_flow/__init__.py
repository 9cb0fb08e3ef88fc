"""Items on their way: sources, buffers and stages, of which ``prefetch`` and ``pipeline`` are made."""

__all__: list[str] = []
