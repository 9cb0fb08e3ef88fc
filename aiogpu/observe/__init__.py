"""What watches the runtime from outside: one sink per file.

Nothing in aiogpu imports this package. The runtime counts, and tells observers that it does not know; whoever
subscribes pays.
"""
