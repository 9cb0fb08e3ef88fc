"""Transfers: data between host and device, without blocking and without early reads.

``api`` has the public calls. ``single`` carries out those of one small tensor, the most frequent ones;
``uploads`` and ``downloads`` the others, through ``staging`` where host
memory is not page-locked: ``segments`` cuts a transfer up, ``crew`` has the threads that take a segment each,
``ring`` the chunks, ``pinned`` the memory, ``hostcopy`` the copying, ``layout`` the order of elements.
``tree`` and ``arrays`` take users' data apart; ``alike`` looks at very many tensors together, and ``packing``
makes few large ones of them.
"""
