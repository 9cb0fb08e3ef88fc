"""Transfers: data between host and device, without blocking and without early reads.

``api`` has the public calls; ``uploads`` and ``downloads`` carry them out, through ``staging`` where host
memory is not page-locked (``pinned`` has the blocks). ``tree`` and ``arrays`` take users' data apart.
"""
