"""Code that runs on a host, and the messages it exchanges with the operator's machine."""
