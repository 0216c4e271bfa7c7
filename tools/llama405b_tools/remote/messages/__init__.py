"""Messages between the operator's machine and a host's agent: requests in, replies out, each a line of JSON. Pure.

Both ends read them with ``contract.reader``. Times are seconds since the epoch by the writer's clock. Each kind of request
has its own module: an agent handles only one, and creating the types of all would take longer than most answers.
"""
