"""Many single calls become one call of a function: see :mod:`aiogpu._batching.batcher`."""
