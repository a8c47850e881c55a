"""The servers of the race: chatserve itself and those it is measured against.

One module per server knows how to find it, its best settings and its dialect; `process` knows how to run any of
them. A server that is not installed here is *missing*, with the reason, and is never silently left out.
"""
