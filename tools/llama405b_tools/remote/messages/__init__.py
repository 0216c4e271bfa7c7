"""What goes between the operator's machine and a host's agent: requests in, replies out, each a line of JSON. Pure.

Both ends read them with ``contract.reader``. Times are seconds since the epoch by the clock of whoever writes. One module for
each kind of question: an agent lives for one, and making the types of all would take longer than most answers.
"""
