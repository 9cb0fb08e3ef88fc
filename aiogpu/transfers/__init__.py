"""Transfers: data between host and device, without blocking and without early reads.

``api`` has the public calls; ``uploads`` and ``downloads`` carry them out, through ``staging`` where host
memory is not page-locked: ``ring`` has the chunks and says whose turn it is, ``crew`` the threads that
copy, ``pinned`` the memory, ``layout`` the order of elements. ``tree`` and ``arrays`` take users' data apart.
"""
