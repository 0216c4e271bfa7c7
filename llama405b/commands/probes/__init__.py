"""What measures hosts, on every rank: ``bench``, ``doctor --deep``, ``plan --calibrate`` and ``--rehearse`` choose among its probes."""
