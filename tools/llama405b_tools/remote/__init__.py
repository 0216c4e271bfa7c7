"""What runs on a host: the agent, the node runner, the sampler, the probes, the log reader, the relay."""
